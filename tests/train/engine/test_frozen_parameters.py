"""Frozen parameters: which of them the script moves is found from a few entries, and told in a poll's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.virtual_workers import notices
from torch import Tensor, nn

from gossamer.train.engine.frozen_parameters import ENTRIES, FrozenParameters, flags_bytes, pack_flags, unpack_flags


def model_of(*shapes: tuple[int, ...]) -> nn.ParameterList:
    frozen = [nn.Parameter(torch.ones(shape), requires_grad=False) for shape in shapes]
    return nn.ParameterList([nn.Parameter(torch.ones(3)), *frozen])


@pytest.mark.parametrize("count", [0, 1, 48, 49, 100])
def test_flags_come_back_from_numbers_that_a_float64_holds(count: int) -> None:
    flags = np.random.default_rng(count).random(count) < 0.5
    numbers = torch.tensor(pack_flags(flags), dtype=torch.float64)
    assert np.array_equal(unpack_flags(numbers.tolist(), count), flags)
    assert numbers.nbytes == flags_bytes(count)


def test_rounds_between_looks_double() -> None:
    frozen = FrozenParameters(model_of((2,)))
    assert [number for number in range(40) if frozen.looked_at(number)] == [0, 1, 2, 4, 8, 16, 32]
    assert not FrozenParameters(nn.Linear(2, 2)).looked_at(0)  # with none there is nothing to look at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_parameter_that_is_written_behind_autograd_is_found(dtype: torch.dtype) -> None:
    model = model_of((2, 3), (ENTRIES * 10,), (4, 5)).to(dtype)
    frozen = FrozenParameters(model)
    assert frozen.moved().tolist() == [False, False, False]
    model[2].data.mul_(0.5)
    assert frozen.moved().tolist() == [False, True, False]
    model[3] = nn.Parameter(torch.zeros(4, 5, dtype=dtype), requires_grad=False)
    assert frozen.moved().tolist() == [False, True, True]


@pytest.mark.parametrize("place", [0, -1])
def test_a_change_of_the_first_or_last_entry_is_found(place: int) -> None:
    model = model_of((ENTRIES * 10,))
    frozen = FrozenParameters(model)
    model[1].data[place] = 0.0
    assert frozen.moved().tolist() == [True]


def test_numbers_that_are_nan_stay_where_they_are() -> None:
    model = model_of((2,))
    model[1].data.fill_(torch.nan)
    assert FrozenParameters(model).moved().tolist() == [False]


def test_trainable_and_whole_numbered_and_tied_parameters_are_left_out() -> None:
    model = model_of((2,))
    model.append(nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    model.append(model[1])
    assert list(FrozenParameters(model)._holders) == ["1"]


def averaged(frozen: FrozenParameters, *moved: bool) -> dict[str, Tensor]:
    frozen.average(np.array(moved), gives_notice=True)
    return frozen.averaged


def test_what_has_moved_once_is_averaged_from_then_on_and_told_once() -> None:
    model = model_of((2,), (3,), (4,))
    frozen = FrozenParameters(model)
    with notices() as said:
        assert list(averaged(frozen, False, False, False)) == []
        assert list(averaged(frozen, False, False, True)) == ["3"]
        assert list(averaged(frozen, True, False, False)) == ["1", "3"]
        assert list(averaged(frozen, True, False, True)) == ["1", "3"]
        frozen.average(np.array([True, True, True]), gives_notice=False)
    assert ['"3"' in text for text in said] == [True, False]
    assert "4 numbers" in said[0]
    assert "6 numbers" in said[1]
    assert frozen.averaged["2"] is model[2]


def test_after_a_checkpoint_changes_count_from_what_it_holds() -> None:
    model = model_of((2,), (3,))
    frozen = FrozenParameters(model)
    frozen.resume(["2"])
    model[1].data.zero_()  # loaded
    assert frozen.names == ["2"]
    assert frozen.moved().tolist() == [False, False]
    model[1].data.fill_(5.0)
    assert frozen.moved().tolist() == [True, False]


def test_what_had_changed_in_a_checkpoint_has_changed_after_it() -> None:
    model = model_of((2,), (3,))
    frozen = FrozenParameters(model)
    model[2].data.fill_(2.0)
    assert frozen.changed == ["2"]
    again = FrozenParameters(other := model_of((2,), (3,)))
    again.loading(frozen.changed, ["1"])
    assert again.names == ["1"]
    other.load_state_dict(model.state_dict())
    other[1].data.fill_(3.0)  # as the checkpoint had it, too
    again.note()
    assert again.changed == ["2"]
