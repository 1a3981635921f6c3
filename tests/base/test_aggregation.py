"""State of compressors: memory for the next state, which parts of a state share with the whole."""

from __future__ import annotations

import torch

from gossamer.base.aggregation import State
from gossamer.base.layout import FlatTensors


def residuals() -> State:
    return State({f"{key}.residual": FlatTensors.pack({"w": torch.zeros(3)}) for key in ("inner", "outer")})


def address(packed: FlatTensors) -> int:
    return packed.flat.data_ptr()


def test_scratch_memory_is_the_same_until_a_commit() -> None:
    state = residuals()
    assert address(state.scratch("inner.residual")) == address(state.scratch("inner.residual"))
    assert address(state.scratch("inner.residual")) != address(state["inner.residual"])


def test_a_part_of_a_state_uses_the_scratch_memory_of_the_whole() -> None:
    state = residuals()
    of_part = state.part("inner.").scratch("residual")
    assert address(of_part) == address(state.part("inner.").scratch("residual"))
    assert address(of_part) == address(state.scratch("inner.residual"))
    assert address(of_part) != address(state.part("outer.").scratch("residual"))


def test_a_commit_makes_the_former_state_scratch_memory() -> None:
    before = residuals()
    after = State({key: before.scratch(key) for key in before}).after(before)
    assert [address(after.scratch(key)) for key in after] == [address(before[key]) for key in before]
