"""OneBit: a mean magnitude per block, or two means per column."""

from __future__ import annotations

import pytest
import torch
from laws.laws import Group
from support.virtual_workers import Worker, cluster, seeded
from torch import Tensor, nn

from gossamer.algorithms.compressors import Codec, Compressor, Feedback, OneBit
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.base.runner import simulate
from gossamer.errors import NotFinite


def send(codec: Codec, x: Tensor) -> tuple[Payload, Tensor]:
    """What travels for one tensor, and what it stands for, in x's shape."""
    one = FlatTensors.pack({"x": x})
    payload = codec.encode(one, AggregationContext())
    return payload, FlatTensors(codec.decoded(payload, one.layout, one.flat), one.layout)["x"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_block_by_hand() -> None:
    (scales, bits), meant = send(OneBit(block=8), torch.tensor([1.0, -2.0, 3.0, 0.0, -0.0, 6.0, -7.0, 5.0, -1.0, 3.0]))
    assert scales.tolist() == [3.0, 2.0]
    assert bits.tolist() == [0b01000010, 0b01]
    assert meant.tolist() == [3.0, -3.0, 3.0, 3.0, 3.0, 3.0, -3.0, 3.0, -2.0, 2.0]


@pytest.mark.parametrize("x", [normal(64), normal(64).exp(), torch.eye(1, 64).double()[0]], ids=["bell", "up", "spike"])
def test_error_of_a_block(x: Tensor) -> None:
    _, meant = send(OneBit(block=64), x)
    scale = float(x.abs().mean().float())
    assert float((x - meant).square().sum()) == pytest.approx(float(x.square().sum()) - 64 * scale**2, rel=1e-6)


def test_the_root_mean_square_would_be_no_contraction() -> None:
    x = torch.full((64,), 0.01).double()
    x[0] = 10
    _, meant = send(OneBit(block=64), x)
    twin = torch.where(x < 0, -1, 1) * x.square().mean().sqrt()
    assert float((x - meant).norm()) < float(x.norm()) < float((x - twin).norm())


def test_columns_by_hand() -> None:
    x = torch.tensor([[1.0, -2.0, -1.0, 0.0], [3.0, -4.0, -2.0, 0.0], [5.0, 6.0, -6.0, -0.0]])
    (values, bits), meant = send(OneBit(columns=True), x)
    assert values.tolist() == [[3.0, 0.0], [6.0, -3.0], [0.0, -3.0], [0.0, 0.0]]  # an empty side says nothing
    assert bits.tolist() == [0b01100110, 0b0100]
    assert meant.tolist() == [[3.0, -3.0, -3.0, 0.0], [3.0, -3.0, -3.0, 0.0], [3.0, 6.0, -3.0, 0.0]]


@pytest.mark.parametrize("shape", [(30, 7), (1, 7), (7, 1), (8, 3, 2, 2), (40,), ()], ids=str)
def test_columns_are_rounded_to_the_nearest_pair(shape: tuple[int, ...]) -> None:
    x = normal(*shape) + 0.3
    (values, _), meant = send(OneBit(columns=True), x)
    error = (x - meant).reshape(shape[0], -1) if len(shape) > 1 else (x - meant).reshape(-1, 1)
    assert len(values) == error.shape[1]
    assert float(error.sum(0).abs().max()) < 1e-5, "a column's sum changed"
    side = (x < 0).reshape(error.shape)
    for nudge in (-0.01, 0.01):
        for which in (side, ~side):
            if which.any():
                assert float((error + nudge * which).square().sum()) > float(error.square().sum())


def test_one_column_where_there_is_no_matrix() -> None:
    x = normal(40)
    (values, bits), _ = send(OneBit(columns=True), x)
    assert values.tolist() == [[pytest.approx(float(x[x >= 0].mean())), pytest.approx(float(x[x < 0].mean()))]]
    assert bits.shape == (5,)


def test_columns_of_a_strided_tensor() -> None:
    """A column is a column wherever its entries lie in memory."""
    x = normal(6, 5, 3, 3)
    _, plain = send(OneBit(columns=True), x)
    strided = x.contiguous(memory_format=torch.channels_last)
    assert FlatTensors.pack({"x": strided})["x"].stride() != x.stride()
    assert torch.equal(send(OneBit(columns=True), strided)[1], plain)


def test_means_that_leave_the_range_are_not_sent() -> None:
    layout = Layout.of({"x": (64,)})
    for codec in (OneBit(), OneBit(columns=True)):
        with pytest.raises(NotFinite):
            codec.encode(FlatTensors(torch.full((64,), 1e300, dtype=torch.float64), layout), AggregationContext())
    large = FlatTensors(torch.full((64,), 3e38), layout)
    values, _ = OneBit(columns=True).encode(large, AggregationContext())
    assert torch.equal(values, torch.tensor([[3e38, 0.0]])), "the sum of a column need not be in float32's range"


def test_columns_that_save_nothing() -> None:
    by_columns = OneBit(columns=True)
    assert [by_columns.suits(shape) for shape in ((2, 500), (3, 500), (500, 2), (1, 1), (0, 3))] == [
        False, True, True, False, False,
    ]  # fmt: skip
    assert OneBit().suits((2, 500))


def test_who_wants_feedback() -> None:
    assert OneBit().wants_feedback
    assert not OneBit(feedback=False).wants_feedback


def descended(compressor: Compressor, steps: int = 400) -> float:
    """How far from the minimum of a badly scaled quadratic a descent ends, relative to its start."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    curvature = torch.logspace(-1, 0, 512).view(64, 8)[order]
    layout = Layout.of({"x": (64, 8)})
    x = normal(64, 8).float()
    start = float(x.norm())
    state = compressor.init(FlatTensors(torch.zeros(layout.numel), layout), AggregationContext())
    for step in range(steps):
        gradient = FlatTensors((curvature * x).view(-1), layout)
        (staged,) = simulate([compressor.aggregate(gradient, state, AggregationContext(step=step))])
        state = staged.next_state.after(state)
        x -= 0.5 * staged.mean.view_as(x)
    return float(x.norm()) / start


@pytest.mark.parametrize("codec", [OneBit(), OneBit(block=64), OneBit(columns=True)], ids=repr)
def test_feedback_makes_signs_enough(codec: Codec) -> None:
    assert descended(Feedback(codec)) < descended(codec) / 5


# -- zeros -------------------------------------------------------------------------------------------------------------


def moved_rows(recipe: str) -> set[int]:
    """Rows of an embedding of which no batch holds those from 8 on, that moved under Adam all the same."""

    def work(worker: Worker) -> Tensor:
        with seeded(0):
            table = nn.Embedding(16, 32)
        before = table.weight.detach().clone()
        model, optimizer, _ = worker.start(table, lambda m: torch.optim.Adam(m.parameters(), 0.01), recipe)
        for step in range(6):
            words = torch.randint(0, 8, (12,), generator=torch.Generator().manual_seed(10 * step + worker.rank))
            optimizer.zero_grad()
            model(words).square().sum().backward()
            optimizer.step()
        return (table.weight.detach() != before).any(1).nonzero().view(-1)

    return set(cluster(work, 2)[0].tolist())


@pytest.mark.parametrize("block", [8, 16, 32])
def test_rows_that_nobody_used_stay_where_blocks_end_with_rows(block: int) -> None:
    assert moved_rows(f"OneBit(block={block})") == set(range(8))


def test_rows_that_share_a_block_with_others_move() -> None:
    """A bit has no third value: what the docstring says of larger blocks."""
    assert moved_rows("OneBit(block=512)") > set(range(8))
    assert moved_rows('Route(OneBit(block=512), names="*weight*")') == set(range(8))


def test_what_a_zero_was_sent_in_all_steps_together_stays_bounded() -> None:
    """It is what is owed for it, with the other sign."""
    layout = Layout.of({"x": (64,)})
    group = Group(Feedback(OneBit(block=64)), 2, layout=layout, dtype=torch.float32)
    sent, largest = torch.zeros(64), 0.0
    for _ in range(200):
        gradients = group.gradients()
        for x in gradients:
            x[40:] = 0
        sent += group.aggregate(gradients)[0].mean
        largest = max(largest, float(sent[40:].abs().max()))
    owed = torch.stack([state["residual"].flat for state in group.states]).mean(0)
    torch.testing.assert_close(sent[40:], -owed[40:], atol=1e-3, rtol=0)
    assert largest < 10
