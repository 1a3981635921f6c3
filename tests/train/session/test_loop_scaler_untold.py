"""Untold scaler: the first overflow is skipped on every rank alike, as with a GradScaler that attach was given."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, agree, cluster, loss_of, network, parameters
from torch import Tensor, nn
from torch.amp import GradScaler

from gossamer.errors import LoopError
from gossamer.train.session import loop_scaler
from gossamer.train.session.loop_scaler import ScalerWatch

PLAIN = {name: vars(GradScaler)[name] for name in ("unscale_", "step")}
Trained = tuple[Tensor, float, int]


def trained(
    worker: Worker, recipe: str = "Dense()", *, told: bool = False, clips: bool = False, fused: bool = False
) -> Trained:
    """Parameters, loss scale and steps; rank 1 overflows in steps 0 and 3."""
    model = network(0, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    session = worker.attach(model, optimizer, recipe, scaler=scaler if told else None)
    for step in range(6):
        optimizer.zero_grad()
        overflows = worker.rank == 1 and step in (0, 3)
        scaler.scale(loss_of(model, step, worker.rank) * (1e38 if overflows else 1.0)).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert session.scaler is scaler
    return parameters(model), scaler.get_scale(), session.steps


@pytest.mark.parametrize("options", [{}, {"clips": True}, {"fused": True}], ids=str)
def test_an_overflow_is_skipped_on_every_rank_as_with_a_scaler_that_is_told(options: dict[str, bool]) -> None:
    found = cluster(lambda worker: trained(worker, **options), 3)
    told = cluster(lambda worker: trained(worker, told=True, **options), 3)
    agree([*(ended for ended, *_ in found), told[0][0]])
    assert [rest for _, *rest in found] == [rest for _, *rest in told] == [[2.0**14, 4]] * 3


@pytest.mark.parametrize("recipe", ["LocalSGD(period=2)", "Gossip() + Ring()"])
def test_steps_that_it_leaves_out_count_where_workers_train_apart(recipe: str) -> None:
    """Else this rank would come to its rounds later than the others."""
    found = cluster(lambda worker: trained(worker, recipe), 2)
    told = cluster(lambda worker: trained(worker, recipe, told=True), 2)
    for (ended, *rest), (as_told, *as_told_rest) in zip(found, told, strict=True):
        assert torch.equal(ended, as_told)
        assert rest == as_told_rest
    assert [scale for _, scale, _ in found] == [2.0**16, 2.0**14]


def test_without_the_watch_the_scaler_refuses_to_find_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScalerWatch, "__init__", lambda self, found: None)
    monkeypatch.setattr(ScalerWatch, "remove", lambda self: None)
    with pytest.raises(AssertionError, match="No inf checks"):
        cluster(trained, 2)


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "EveryStep(delay=1)", "EveryStep(accumulate=2)"])
def test_what_is_kept_in_units_of_the_scale_needs_it_from_the_beginning(recipe: str) -> None:
    with pytest.raises(LoopError, match=r"the state of .* includes a scale.*scaler=scaler\)"):
        cluster(lambda worker: trained(worker, recipe), 2)


def test_a_scaler_of_another_optimizer_or_switched_off_is_left_alone() -> None:
    def work(worker: Worker) -> Any:
        model, optimizer, session = worker.start(network(0, torch.float32), sgd)
        other = nn.Linear(2, 1)
        theirs = torch.optim.SGD(other.parameters(), 0.1)
        scaler, idle = GradScaler("cpu"), GradScaler("cpu", enabled=False)
        scaler.scale(other(torch.ones(1, 2)).sum()).backward()
        scaler.step(theirs)
        idle.scale(loss_of(model, 0, worker.rank)).backward()
        idle.step(optimizer)
        return session.scaler

    assert cluster(work, 2) == [None, None]


class Listener:
    def __init__(self) -> None:
        self.heard = 0

    def hear(self, scaler: Any, optimizer: Any) -> bool:
        self.heard += 1
        return False


def make_a_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)


def test_torchs_class_is_as_it_was_once_nobody_watches() -> None:
    gc.collect()  # sessions of other tests
    first, second = Listener(), Listener()
    one, two = ScalerWatch(first.hear), ScalerWatch(second.hear)
    one.remove()
    make_a_step()
    assert (first.heard, second.heard) == (0, 2)  # step, and unscale_ within it
    two.remove()
    make_a_step()
    assert second.heard == 2
    assert loop_scaler._watchers or {name: vars(GradScaler)[name] for name in PLAIN} == PLAIN


def test_a_watcher_that_is_gone_is_not_called() -> None:
    listener = Listener()
    watch = ScalerWatch(listener.hear)
    del listener
    gc.collect()
    make_a_step()
    watch.remove()
