"""The outer optimizer of merges of a part of the workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.train.parameter_server.delayed_nesterov import DelayedNesterov


def path(
    moves: Sequence[float | Tensor], shares: Sequence[float], lr: float = 1.0, momentum: float = 0.5
) -> list[Tensor]:
    """The parameter after each step from 0."""
    parameter = Parameter(torch.zeros_like(torch.as_tensor(moves[0], dtype=torch.float64)))
    optimizer = DelayedNesterov([parameter], lr=lr, momentum=momentum)
    found = []
    for move, share in zip(moves, shares, strict=True):
        parameter.grad = torch.as_tensor(move, dtype=torch.float64)
        optimizer.param_groups[0]["share"] = share
        optimizer.step()
        found.append(parameter.detach().clone())
    return found


def test_a_round_of_two_merges_is_the_example_by_hand() -> None:
    """N_b = 2, beta = 0.5, c = 0, lr = 1, differences 1 and 3: -0.5, then m = 2 and -(1 + 1.5)."""
    assert [each.item() for each in path([1.0, 3.0], [0.5, 0.5])] == [-0.5, -3.0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_merges_of_all_workers_are_the_nesterov_momentum_of_torch_bit_for_bit(momentum: float) -> None:
    generator = torch.Generator().manual_seed(3)
    moves = [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(6)]
    expected = Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = torch.optim.SGD([expected], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    found = path(moves, [1.0] * 6, lr=0.7, momentum=momentum)
    for move, each in zip(moves, found, strict=True):
        expected.grad = move.clone()
        optimizer.step()
        assert torch.equal(each, expected)


@pytest.mark.parametrize("count", [2, 3, 7, 10])
def test_a_round_of_equal_parts_is_one_nesterov_step_with_their_mean(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    moves = [torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(4 * count)]
    means = [torch.stack(moves[start : start + count]).mean(0) for start in range(0, len(moves), count)]
    found = path(moves, [1 / count] * len(moves), momentum=0.9)[count - 1 :: count]
    torch.testing.assert_close(found, path(means, [1.0] * 4, momentum=0.9), rtol=0, atol=1e-12)


def test_every_difference_enters_the_momentum_once_in_rounds_of_uneven_parts() -> None:
    """Without decay of time, the end is the sum of the differences over 1 - momentum."""
    shares = [2 / 3, 2 / 3, 1 / 3, 1.0, 0.25]
    done = path([1.0] * 5 + [0.0] * 200, shares + [1.0] * 200, momentum=0.5)[-1]
    assert done.item() == pytest.approx(-sum(shares) / (1 - 0.5))
    steps = path([3.0] + [0.0] * 4, [2 / 3] * 5, momentum=0.5)
    assert len({each.item() for each in steps}) == 4, "the momentum moves in merges 2, 3 and 5 of 5"


def test_the_gradient_and_other_parameters_are_not_modified() -> None:
    moved, kept = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = DelayedNesterov([moved, kept], lr=1.0, momentum=0.9)
    given = torch.tensor([1.0, 2.0])
    moved.grad = given.clone()
    optimizer.step()
    assert torch.equal(moved.grad, given)
    assert torch.equal(kept, torch.ones(2))
    assert kept not in optimizer.state


def test_the_state_continues_within_a_round() -> None:
    def run(restart_after: int) -> float:
        parameter = Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = DelayedNesterov([parameter], lr=1.0, momentum=0.5, share=0.25)
        for number in range(6):
            parameter.grad = torch.tensor(float(number + 1), dtype=torch.float64)
            optimizer.step()
            if number == restart_after:
                state, optimizer = optimizer.state_dict(), DelayedNesterov([parameter])
                optimizer.load_state_dict(state)
        return parameter.item()

    assert run(1) == run(2) == run(-1)
