"""Averaging without a session: what are no tensors is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gossamer


@pytest.mark.parametrize("given", [None, 3, [1.0], {"loss": 0.5}, [torch.ones(1), None]], ids=repr)
def test_what_are_no_tensors_is_named(given: Any) -> None:
    """Alone, too, where nothing would be averaged."""
    with pytest.raises(TypeError, match=r"average_ overwrites tensors.*gossamer\.average_\(\[tensor\], \.\.\.\)"):
        gossamer.average_(given, "Dense()")


def test_tensors_in_any_container_are_served() -> None:
    tensors = [torch.ones(2), torch.zeros(1)]
    for given in (tensors, tuple(tensors), iter(tensors), dict(enumerate(tensors))):
        gossamer.average_(given, "Dense()")  # type: ignore[arg-type]
    assert tensors[0].tolist() == [1.0, 1.0]
