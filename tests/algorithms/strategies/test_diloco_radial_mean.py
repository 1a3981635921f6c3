"""DiLoCo's radial-directional mean: lengths and directions of differences are averaged apart."""

from __future__ import annotations

import math

import pytest
import torch
from support.resumed_training import adamw, check_resume
from support.training_loops import START, close, heard, run
from support.virtual_workers import network, parameters, train_step
from torch import Tensor

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import DiLoCo
from gossamer.algorithms.strategies.diloco import restore_lengths, split_lengths
from gossamer.train.traffic.traffic import estimate_traffic

SIZES = [parameter.numel() for parameter in network(0).parameters()]


def radial(differences: list[Tensor], sizes: list[int]) -> Tensor:
    """The mean of Decoupled DiLoCo with equal weights: (mean |v|) phi(mean phi(v)), tensor by tensor."""
    tensors = []
    for parts in zip(*(each.split(sizes) for each in differences), strict=True):
        stacked = torch.stack(parts)
        norms = stacked.norm(dim=1, keepdim=True)
        direction = (stacked / norms.clamp(min=1e-300)).mean(0)
        tensors.append(norms.mean() * direction / direction.norm().clamp(min=1e-300))
    return torch.cat(tensors)


def merged(differences: list[list[float]], sizes: list[int]) -> list[float]:
    """The mean as a round makes it."""
    flats = [torch.tensor(each, dtype=torch.float64) for each in differences]
    lengths = torch.stack([split_lengths(flat, sizes) for flat in flats]).mean(0)
    mean = torch.stack(flats).mean(0)
    restore_lengths(mean, sizes, lengths)
    return mean.tolist()


def test_two_orthogonal_differences_of_length_two_merge_to_length_two() -> None:
    """A plain mean of them has length 1.414."""
    found = merged([[2.0, 0.0], [0.0, 2.0]], [2])
    assert found == pytest.approx([math.sqrt(2), math.sqrt(2)])


def test_each_tensor_has_its_own_length_and_direction() -> None:
    found = merged([[3.0, 4.0, 0.0, 1.0], [3.0, 4.0, 3.0, 0.0]], [2, 2])
    assert found == pytest.approx([3.0, 4.0, math.sqrt(2), math.sqrt(2)])


def test_one_worker_and_equal_differences_are_merged_as_they_are() -> None:
    assert merged([[3.0, -4.0, 0.5]], [2, 1]) == pytest.approx([3.0, -4.0, 0.5])
    assert merged([[3.0, -4.0, 0.5]] * 3, [2, 1]) == pytest.approx([3.0, -4.0, 0.5])


def test_opposite_differences_and_zeros_merge_to_zeros() -> None:
    assert merged([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], [1, 2]) == [0.0, 0.0, 0.0]


def by_hand(steps: int, period: int, momentum: float, world: int = 3) -> list[Tensor]:
    """DiLoCo in a few lines, above AdamW: what all agree on after each step."""
    models = [network(0) for _ in range(world)]
    inner = [adamw(model) for model in models]
    agreed, buffer, path = START.clone(), torch.zeros_like(START), []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            train_step(model, optimizer, step, rank)
        if step % period == period - 1:
            d = radial([agreed - parameters(model) for model in models], SIZES)
            buffer = momentum * buffer + d
            agreed = agreed - 0.7 * (d + momentum * buffer)
            for model in models:
                torch.nn.utils.vector_to_parameters(agreed.clone(), model.parameters())
        path.append(agreed)
    return path


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("period", [1, 4])
def test_training_moves_by_the_radial_mean(period: int, momentum: float) -> None:
    strategy = DiLoCo(period, 0.7, momentum, averaging="radial")
    (plain, *_) = run(DiLoCo(period, 0.7, momentum), 12, rule=adamw)
    wanted = by_hand(12, period, momentum)
    for trace in run(strategy, 12, rule=adamw):
        for ours, theirs in zip(trace.merged, wanted, strict=True):
            close(ours, theirs)
    with pytest.raises(AssertionError):
        close(plain.merged[-1], wanted[-1])


def test_fragments_and_a_delay_keep_lengths_with_their_round() -> None:
    """Every worker's difference has the length that its tensor moves, whichever round is in flight."""
    options = {"fragments": 2, "delay": 1, "averaging": "radial"}
    traces = run(DiLoCo(4, 1.0, 0.0, **options), 12, rule=adamw)
    for trace in traces[1:]:
        assert torch.equal(trace.merged[-1], traces[0].merged[-1])
    alone = run(DiLoCo(4, 1.0, 0.0, **options), 12, world=2, rule=adamw)
    assert not torch.equal(alone[0].merged[-1], traces[0].merged[-1])


@pytest.mark.parametrize(
    "recipe",
    ["DiLoCo(3, averaging='radial') + Float4()", "DiLoCo(4, delay=2, fragments=2, averaging='radial')"],
)
def test_resumed_training_is_the_same_bit_for_bit(recipe: str) -> None:
    check_resume(recipe, [3, 5])


def test_a_number_per_tensor_travels_in_addition() -> None:
    def sent(recipe: str) -> tuple[float, events.Attached]:
        with heard(events.StepEnded) as ended, heard(events.Attached) as attached:
            run(resolve(recipe, 3), 4, rule=adamw, dtype=torch.float32)
        return sum(event.bytes_sent for event in ended) / 3, attached[0]

    (plain, _), (radial, attached) = sent("DiLoCo(4)"), sent("DiLoCo(4, averaging='radial')")
    assert radial - plain == pytest.approx(2 * 2 / 3 * 4 * len(SIZES))
    estimate = estimate_traffic(resolve("DiLoCo(4, averaging='radial')", 3), attached, workers=3)
    assert estimate.bytes_sent == pytest.approx(radial / 4)


def test_few_entries_are_cautioned_against() -> None:
    recipe = resolve("DiLoCo(4, outer_momentum=0.0, averaging='radial') + TopK(0.01)")
    assert 'Write averaging="mean"' in (recipe.strategy.caution(recipe.compressor) or "")
    recipe = resolve("DiLoCo(4, outer_momentum=0.0, averaging='radial') + OneBit()")
    assert recipe.strategy.caution(recipe.compressor) is None


def test_diloco_rejects_an_unknown_averaging() -> None:
    with pytest.raises(ValueError, match=r'averaging must be "mean" or "radial", got \'norm\'.*Write DiLoCo'):
        DiLoCo(4, averaging="norm")


def test_short_changes_of_half_precision_have_a_direction() -> None:
    """One over their length is beyond the range of float16."""
    flat = torch.tensor([3e-6, 4e-6, 0.0], dtype=torch.float16)
    lengths = split_lengths(flat, [2, 1])
    torch.testing.assert_close(flat.float(), torch.tensor([0.6, 0.8, 0.0]), atol=0.02, rtol=0)
    restore_lengths(flat, [2, 1], lengths)
    torch.testing.assert_close(flat.float(), torch.tensor([3e-6, 4e-6, 0.0]), atol=1e-7, rtol=0)
