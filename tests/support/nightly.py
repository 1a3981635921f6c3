"""Cases that only `make test-nightly` runs: `@pytest.mark.parametrize("recipe", ["Dense()", *nightly("Int8()")])`."""

from __future__ import annotations

import pytest


def nightly(*values: object) -> list[object]:
    """One parameter set per value; a tuple holds the values of several arguments."""
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*arguments, marks=pytest.mark.nightly) for arguments in each]
