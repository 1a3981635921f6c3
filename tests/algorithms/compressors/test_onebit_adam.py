"""1-bit Adam: what is sent of the momentum once the variance is frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from laws.formulas import ring
from laws.laws import LAYOUT, Group, close
from support.adam_training import adam, everywhere, unused_rows
from support.aggregations import priced_bytes
from support.virtual_workers import (
    Worker,
    batch,
    cluster,
    loss_of,
    network,
    notices,
    parameters,
    train_step,
)
from torch import Tensor, nn

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, OneBit, OneBitAdam, Route, Sharded
from gossamer.algorithms.compressors.dgc import MOMENTUM
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext, AggregationResult
from gossamer.errors import AttachError, LoopError
from gossamer.train.moments.frozen_variance import FrozenVariance


class Accelerated(Group):
    """A group whose optimizer has a first beta."""

    def at(self, rank: int) -> AggregationContext:
        return replace(super().at(rank), momentum=0.8)


@pytest.mark.parametrize(
    "inner", [Dense(), Feedback(OneBit(block=16)), Feedback(Int8()), Feedback(Sharded(Int8(block=16)))], ids=repr
)
def test_own_parts_average_to_the_mean(inner: Compressor) -> None:
    group = Accelerated(OneBitAdam(warmup=2, inner=inner), 3)
    owed = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for _ in range(6):
        staged = group.aggregate(group.gradients())
        now = sum((each.owed for each in staged if each.owed is not None), torch.zeros_like(owed))
        close(torch.stack([each.own for each in staged]).mean(0), staged[0].mean + now - owed, 1e-11)
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
        assert all(torch.equal(state[MOMENTUM].flat, group.states[0][MOMENTUM].flat) for state in group.states)
        owed = now


def momenta(inner: Compressor, steps: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """(Adam's moment of what came out, of what was put in, what is owed), all of the mean."""
    group = Accelerated(OneBitAdam(warmup=2, inner=inner), 3)
    came, put = torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
    for _ in range(steps):
        gradients = group.gradients()
        put = 0.8 * put + 0.2 * torch.stack(gradients).mean(0)
        staged: list[AggregationResult] = group.aggregate(gradients)
        came = 0.8 * came + 0.2 * staged[0].mean
    owed = torch.stack([state[RESIDUAL].flat for state in group.states if RESIDUAL in state] or [0 * came]).mean(0)
    return came, put, owed


def test_nothing_changes_where_the_inner_compressor_loses_nothing() -> None:
    came, put, _ = momenta(Dense())
    close(came, put, 1e-12)


def test_feedback_keeps_adams_moment_near_what_it_should_be() -> None:
    """m' + mean e' = b1 m + (1 - b1) g + mean e: what rounding took comes back, so the moments stay close."""
    came, put, owed = momenta(Feedback(OneBit(block=64)), 60)
    lost, _, _ = momenta(OneBit(block=64), 60)
    with_feedback, without = (float((each - put).norm() / put.norm()) for each in (came, lost))
    assert float(owed.norm()) > 0
    assert with_feedback < without


@pytest.mark.parametrize("world", [2, 3, 8])
def test_bytes_of_both_phases(world: int) -> None:
    compressor = OneBitAdam(warmup=3, inner=Feedback(OneBit(block=64)))
    for step, expected in [
        (0, ring(world, 4 * LAYOUT.numel)),
        (2, ring(world, 4 * LAYOUT.numel)),
        (3, sum((world - 1) * (-(-size // 8) + 4 * -(-size // 64)) for size in LAYOUT.sizes)),
    ]:
        assert priced_bytes(compressor, world, LAYOUT, step) == expected


def test_a_recipe_feeds_back_and_shards_the_inner_compressor() -> None:
    assert resolve("OneBitAdam(10)").compressor == Route(OneBitAdam(10, inner=Feedback(OneBit())))
    assert resolve("OneBitAdam(10)", 8).compressor == Route(OneBitAdam(10, inner=Feedback(Sharded(OneBit()))))
    assert resolve("OneBitAdam(10, inner=Dense())").compressor == Route(OneBitAdam(10, inner=Dense()))


@pytest.mark.parametrize(
    ("arguments", "wrong"), [({"warmup": 0}, "warmup must be the steps"), ({"clip": -1.0}, r"OneBitAdam\(clip=1.0\)")]
)
def test_refusals(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        OneBitAdam(**arguments)


# -- what training comes to once the variance is frozen ----------------------------------------------------------------


def one_bit_adam(inner: str = "Dense()", warmup: int = 4) -> str:
    return everywhere(f"OneBitAdam(warmup={warmup}, inner={inner})")


def test_the_optimizers_own_state_continues() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = adam(model)
        session = worker.attach(model, optimizer, "OneBitAdam(2)")  # one matrix of three has 256 entries
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            kept = {p: {key: t.clone() for key, t in state.items()} for p, state in optimizer.state.items()}
            optimizer.step()
            for name, p in model.named_parameters():
                frozen = name == "2.weight" and step >= 2
                now = optimizer.state[p]
                assert int(now["step"]) == step + 1
                if step:
                    assert not torch.equal(now["exp_avg"], kept[p]["exp_avg"])
                    assert torch.equal(now["exp_avg_sq"], kept[p]["exp_avg_sq"]) == frozen
        moment = optimizer.state[model.get_parameter("2.weight")]["exp_avg"]
        told = session.state_dict()["state"]["2.weight"]["0.momentum"]
        assert told.norm() > 0
        assert float((moment - told).norm()) < float(moment.norm())  # but for the warm-up's, which fades
        session.close()
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 5]

    cluster(work, 2)


@pytest.mark.parametrize("inner", ["OneBit(block=8)", "OneBit(block=2048)", "OneBit(columns=True)", "Int8()"])
def test_rows_that_nobody_used_stay_bit_for_bit(inner: str) -> None:
    before, after, _ = unused_rows(f"OneBitAdam(warmup=4, inner={inner})")
    assert torch.equal(before, after)


def test_rows_would_move_without_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FrozenVariance._move

    def unmasked(self: FrozenVariance, parameter: nn.Parameter, group: Any) -> None:
        state = self.optimizer.state[parameter]
        kept = state["exp_avg_sq"]
        state["exp_avg_sq"] = kept.clamp(min=1e-20)
        honest(self, parameter, group)
        state["exp_avg_sq"] = kept

    monkeypatch.setattr(FrozenVariance, "_move", unmasked)
    before, after, _ = unused_rows("OneBitAdam(warmup=4, inner=OneBit(block=2048))")
    assert not torch.equal(before, after)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_clipping_of_the_whole_norm_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, adam(model), one_bit_adam(), clip_norm=1.0)

    with pytest.raises(AttachError, match=r"write clip=1\.0"):
        cluster(work, 2)


@pytest.mark.parametrize(("dtype", "served"), [(torch.float16, False), (torch.bfloat16, True), (torch.float32, True)])
def test_numbers_that_cannot_hold_a_variance_are_refused(dtype: torch.dtype, served: bool) -> None:
    """Else training ends with parameters that are not finite on every rank."""

    def work(worker: Worker) -> Tensor:
        model = network(0).to(dtype)
        optimizer = adam(model)
        worker.attach(model, optimizer, one_bit_adam("OneBit()", warmup=2))
        for step in range(6):
            optimizer.zero_grad()
            model(batch(step, worker.rank)[0].to(dtype)).float().square().mean().backward()
            optimizer.step()
        return parameters(model).float()

    if served:
        assert torch.isfinite(cluster(work, 2)[0]).all()
        return
    with pytest.raises(AttachError, match=r'"0\.weight" is float16.*Keep parameters in float32'):
        cluster(work, 2)


def test_a_first_gradient_after_the_warm_up_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = adam(model)
        worker.attach(model, optimizer, one_bit_adam(warmup=2))
        for step in range(4):
            optimizer.zero_grad()
            part = model if step == 3 else model[:2]
            part(batch(step, worker.rank)[0]).square().mean().backward()
            optimizer.step()

    with pytest.raises(LoopError, match=r'"[24]\.weight" has its first gradient after the warm-up'):
        cluster(work, 2)


@pytest.mark.parametrize(("warmup", "lines"), [(2, 2), (100, 1)])
def test_a_short_warm_up_is_noticed(warmup: int, lines: int) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, adam(model), one_bit_adam(warmup=warmup))

    with notices() as said:
        cluster(work, 2)
    assert len(said) == lines
    assert f"after {warmup} steps" in said[0]
    assert "frozen" in said[0]
    assert all("3.2 times as long" in line for line in said[1:])


def test_what_travels_begins_at_zero_and_the_warm_ups_moment_stays_in_adams_state() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, betas=(0.9, 0.99))
        session = worker.attach(model, optimizer, "OneBitAdam(warmup=3, inner=Dense())")
        held = model[2].weight  # type: ignore[index]

        def travels() -> Tensor:
            return session.state_dict()["state"]["2.weight"][f"0.{MOMENTUM}"].clone()

        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        assert not travels().any()
        after_warm_up = optimizer.state[held]["exp_avg"].clone()
        assert after_warm_up.any()
        for step in range(3, 6):
            train_step(model, optimizer, step, worker.rank)
            kept = after_warm_up * 0.9 ** (step - 2)
            torch.testing.assert_close(optimizer.state[held]["exp_avg"], kept + travels())

    cluster(work, 2)
