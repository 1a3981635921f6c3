"""Untold scaler: the first overflow is skipped on every rank alike, as with a GradScaler that attach was given."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, agree, cluster, loss_of, network, notices, parameters
from torch import Tensor, nn
from torch.amp import GradScaler

from gossamer.errors import LoopError
from gossamer.train.session import loop_scaler
from gossamer.train.session.loop_scaler import ScalerWatch, SkippedStepHook

PLAIN = {name: vars(GradScaler)[name] for name in ("scale", "unscale_", "step")}
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
def test_overflow_is_skipped_on_every_rank_as_with_scaler_given_to_attach(options: dict[str, bool]) -> None:
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
def test_residuals_in_units_of_the_scale_require_scaler_at_attach(recipe: str) -> None:
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


def test_grad_scaler_class_is_restored_after_the_last_watcher() -> None:
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


# -- Scaler hook: hears of exactly the attached optimizer's steps that a GradScaler leaves out, until it is removed


class Loop:
    """Two optimizers that share a scaler, as a GAN's do; the first is attached."""

    def __init__(self) -> None:
        self.models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.skipped = 0
        self.hook = SkippedStepHook(self.scaler, self.optimizers[0], self.count)

    def count(self) -> None:
        self.skipped += 1

    def train(self, which: int, factor: float) -> Any:
        self.optimizers[which].zero_grad()
        self.scaler.scale(self.models[which](torch.ones(3, 2)).mean() * factor).backward()
        return self.scaler.step(self.optimizers[which])


@pytest.mark.parametrize(("which", "factor", "skipped"), [(0, 1.0, 0), (0, torch.inf, 1), (1, torch.inf, 0)])
def test_skipped_steps_of_the_attached_optimizer_are_counted(which: int, factor: float, skipped: int) -> None:
    """Also where the scale grows after a step that was made, which says nothing."""
    loop = Loop()
    for _ in range(3):
        loop.train(1 - which, 1.0)
        loop.train(which, factor)
        loop.scaler.update()
    assert loop.skipped == 3 * skipped


def test_nothing_stays_once_it_is_removed() -> None:
    loop = Loop()
    loop.hook.remove()
    assert loop.scaler.step.__func__ is torch.amp.GradScaler.step  # type: ignore[attr-defined]
    loop.train(0, torch.inf)
    assert loop.skipped == 0


def test_another_wrapper_is_left_where_it_is() -> None:
    loop = Loop()
    inner = loop.scaler.step
    loop.scaler.step = lambda optimizer: inner(optimizer)  # type: ignore[method-assign,assignment]
    theirs = loop.scaler.step
    loop.hook.remove()
    assert loop.scaler.step is theirs
    loop.train(0, 1.0)
    assert loop.skipped == 0


def test_it_does_not_keep_a_session() -> None:
    loop = Loop()
    scaler, optimizer, model = loop.scaler, loop.optimizers[0], loop.models[0]
    del loop
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(3, 2)).mean() * torch.inf).backward()
    scaler.step(optimizer)


# -- state of one of several scalers, from a checkpoint


def two_scalers(worker: Worker, folder: Path, *, load: bool, joint: bool = False) -> list[float]:
    """Scales after one step of a second optimizer and one of the attached optimizer, with a scaler for each.

    joint: the second loss is also computed by the attached model, as that of a GAN's generator by its discriminator.
    """
    model, optimizer, session = worker.start(network(dtype=torch.float32), sgd, "Dense()")
    second = torch.nn.Linear(6, 6)
    turns = [(GradScaler("cpu", init_scale=2.0 if load else 512.0), sgd(second))]
    turns.append((GradScaler("cpu", init_scale=4.0 if load else 8.0), optimizer))
    if load:
        session.load(folder)
        session.load(folder)
    for number, (scaler, stepped) in enumerate(turns):
        made = second(torch.ones(2, 6))
        loss = model(made).sum() if number or joint else made.sum()
        scaler.scale(loss).backward()
        if number or not joint:
            scaler.step(stepped)
            scaler.update()
        model.zero_grad()
    if not load:
        session.save(folder)
    return [scaler.get_scale() for scaler, _ in turns]


def test_of_two_scalers_that_of_the_attached_optimizer_is_restored(tmp_path: Path) -> None:
    assert cluster(lambda worker: two_scalers(worker, tmp_path, load=False), 2) == 2 * [[512.0, 8.0]]
    with notices() as said:
        assert cluster(lambda worker: two_scalers(worker, tmp_path, load=True), 2) == 2 * [[2.0, 8.0]]
    assert not [line for line in said if "GradScaler" in line]
    with pytest.raises(LoopError, match=r"several GradScalers.*scaler=scaler"):
        cluster(lambda worker: two_scalers(worker, tmp_path, load=True, joint=True), 1)


def test_two_sessions_restore_the_scaler_that_they_share(tmp_path: Path) -> None:
    def work(worker: Worker, load: bool) -> float:
        scaler = GradScaler("cpu", init_scale=4.0 if load else 8.0)
        models = [network(seed, torch.float32) for seed in (0, 1)]
        started = [worker.start(model, sgd, "Dense()") for model in models]
        for number, (_, _, session) in enumerate(started if load else ()):
            session.load(tmp_path / str(number))
        for model, optimizer, _ in started:
            scaler.scale(loss_of(model, 0, worker.rank)).backward()
            scaler.step(optimizer)
        scaler.update()
        for number, (_, _, session) in enumerate(() if load else started):
            session.save(tmp_path / str(number))
        return scaler.get_scale()

    assert cluster(lambda worker: work(worker, False), 1) == [8.0]
    with notices() as said:
        assert cluster(lambda worker: work(worker, True), 1) == [8.0]
    assert not [line for line in said if "GradScaler" in line]
