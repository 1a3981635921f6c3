"""Every public name of Horovod for torch exists, or raises an error that names the alternative."""

from __future__ import annotations

import pytest
from support.horovod_names import REFUSED_MODULES, TORCH, missing

from gossamer.horovod.alias import _module


@pytest.mark.parametrize("module", TORCH)
def test_every_name_of_horovod_for_torch_exists(module: str) -> None:
    assert missing(_module(module), TORCH[module]) == set()


@pytest.mark.parametrize("module", REFUSED_MODULES)
def test_modules_that_are_not_available_name_the_alternative(module: str) -> None:
    with pytest.raises(ImportError, match=r"is not available: \w+"):
        _module(module)
