"""Cases that only `make test-nightly` runs: `@pytest.mark.parametrize("recipe", ["Dense()", *nightly("Int8()")])`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import product

import pytest


def nightly(*values: object) -> list[object]:
    """One parameter set per value; a tuple holds the values of several arguments."""
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*arguments, marks=pytest.mark.nightly) for arguments in each]


def once_each(names: str, *values: Iterable[object], not_by_day: Container[object] = ()) -> pytest.MarkDecorator:
    """All combinations: `make test` runs as many as have every value of every argument, `make test-nightly` the others.

    For properties that each value may break on its own, whatever the other arguments are. not_by_day: values whose
    combinations are all nightly.
    """
    lists = [list(each) for each in values]
    daily = [[place for place, value in enumerate(each) if value not in not_by_day] for each in lists]
    by_day = {tuple(each[place % len(each)] for each in daily) for place in range(max(map(len, daily)))}
    combinations = product(*(range(len(each)) for each in lists))
    chosen = [(places, [each[place] for each, place in zip(lists, places, strict=True)]) for places in combinations]
    marks = [[] if places in by_day else [pytest.mark.nightly] for places, _ in chosen]
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*arguments, marks=each, id="-".join(map(_name, arguments)))
            for (_, arguments), each in zip(chosen, marks, strict=True)
        ],
    )


def _name(value: object) -> str:
    return str(getattr(value, "__name__", value)) if isinstance(value, str) or callable(value) else repr(value)
