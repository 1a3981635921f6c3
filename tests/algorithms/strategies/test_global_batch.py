"""Global batch: as many samples in every step, whatever the number of workers."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_workers import Worker, cluster, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer.algorithms.strategies.global_batch import batches_per_step, micro_batches

cases = st.integers(1, 9).flatmap(lambda world: st.tuples(st.integers(world, 40), st.integers(1, 16), st.just(world)))


def check_law(steps: list[tuple[int, ...]], count: int) -> None:
    for counts in steps:
        assert sum(counts) == count
        assert max(counts) - min(counts) <= 1
        assert min(counts) >= 1
    for sums in accumulate(steps, lambda before, now: tuple(map(sum, zip(before, now, strict=True)))):
        assert max(sums) - min(sums) <= 1, "loops drift apart"


@given(cases, st.integers(0, 1000))
def test_a_step_has_as_many_samples_with_any_workers(case: tuple[int, int, int], first: int) -> None:
    count, batch, world = case
    check_law([micro_batches(count * batch, batch, world, step) for step in range(first, first + 12)], count)


def test_who_always_gives_the_rest_to_the_first_is_seen() -> None:
    """The twin: exact in every step, and the first worker comes to its epoch's end long before the others."""
    with pytest.raises(AssertionError, match="drift apart"):
        check_law([micro_batches(256, 8, 5)] * 3, 32)


def test_the_table() -> None:
    assert [micro_batches(48, 4, 5, step) for step in range(3)] == [(3, 3, 2, 2, 2), (2, 2, 3, 3, 2), (3, 2, 2, 2, 3)]
    assert micro_batches(256, 8, 4) == (8, 8, 8, 8)
    assert micro_batches(256, 256, 1) == (1,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((256, 7, 2), r"not a multiple of batch=7 samples.*global_batch=259"),
        ((4, 8, 1), r"not a multiple of batch.*global_batch=8"),
        ((0, 8, 1), r"not a multiple of batch"),
        ((256, 0, 1), r"batch must be a number of samples"),
        (
            (32, 8, 5),
            r"4 batches of 8 samples, too few for 5 workers.*batch=4.*global_batch=40.*at most 4 workers",
        ),
        ((32, 8, 0), r"1 or more.*world=0"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        micro_batches(*arguments)


def test_batches_are_counted() -> None:
    assert batches_per_step(256, 8) == 32


# -- in a loop that was written for one worker -------------------------------------------------------------------------

BATCHES, BATCH, GLOBAL = 24, 2, 12  # four steps of six batches
KEPT = f"EveryStep(global_batch={GLOBAL}, batch={BATCH})"


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(BATCHES, BATCH, 5, generator=generator)
    return x, torch.randn(BATCHES, BATCH, 1, generator=generator)


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    with seeded(2):
        module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    return module, torch.optim.AdamW(module.parameters(), 0.05)


def alone() -> Tensor:
    (x, y), (module, optimizer) = data(), model()
    per_step = GLOBAL // BATCH
    for first in range(0, BATCHES, per_step):
        mse_loss(
            module(x[first : first + per_step].flatten(0, 1)), y[first : first + per_step].flatten(0, 1)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def together(world: int, recipe: str) -> list[Tensor]:
    """Batch j is that of worker j mod world, as shards deal out."""

    def work(worker: Worker) -> Tensor:
        (x, y), (module, optimizer) = data(), model()
        session = worker.attach(module, optimizer, recipe)
        steps = 0
        with session.epoch():
            for place in range(worker.rank, BATCHES, worker.world):
                mse_loss(module(x[place]), y[place]).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert session.accumulating == (session.steps == steps)
                steps = session.steps
        assert session.steps == BATCHES * BATCH // GLOBAL
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    return cluster(work, world)


@pytest.mark.parametrize("recipe", [KEPT, f"{KEPT} + TopK(1.0)"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_the_optimizer_sees_the_mean_over_the_global_batch(world: int, recipe: str) -> None:
    for mine in together(world, recipe):
        torch.testing.assert_close(mine, alone())


def test_alone_nothing_is_compressed() -> None:
    (mine,) = together(1, f"{KEPT} + TopK(0.01)")
    torch.testing.assert_close(mine, alone())


def test_other_numbers_of_passes_are_seen() -> None:
    """The twin: as many passes on every worker are another batch."""
    with pytest.raises(AssertionError):
        together(4, "EveryStep()")
