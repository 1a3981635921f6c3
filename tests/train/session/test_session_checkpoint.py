"""Session checkpoint: what does not fit this run is refused before it is loaded, on every rank, and named."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, heard, loss_of, network, notices, parameters, train_step
from torch import Tensor
from torch.nn import Parameter
from torch.optim import ASGD, SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from gossamer import events
from gossamer.errors import CheckpointError
from gossamer.train import checkpoint
from gossamer.train.checkpoint.snapshot import Flat, SnapshotBuffers
from gossamer.train.session import session_checkpoint
from gossamer.train.session.session import Session

Rule = Callable[[Iterable[Parameter]], Optimizer]
RULES: dict[str, Rule] = {
    "SGD": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "Adam": Adam,
    "AdamW": AdamW,
    "NAdam": NAdam,
    "RMSprop": RMSprop,
}


def saved(worker: Worker, rule: Rule, folder: Path) -> None:
    model = network(0)
    optimizer = rule(model.parameters())
    session = worker.attach(model, optimizer, "TopK(0.5)")
    for step in range(2):
        train_step(model, optimizer, step, worker.rank)
    session.save(folder)


def loaded(worker: Worker, rule: Rule, folder: Path) -> None:
    model = network(3)
    optimizer = rule(model.parameters())
    session = worker.attach(model, optimizer, "TopK(0.5)")
    before = parameters(model)
    try:
        session.load(folder)
    except CheckpointError:
        assert torch.equal(parameters(model), before), "some of it was loaded"
        raise
    train_step(model, optimizer, 2, worker.rank)


@pytest.mark.parametrize(
    ("written", "now"), [("SGD", "Adam"), ("Adam", "SGD"), ("Adam", "AdamW"), ("NAdam", "Adam"), ("AdamW", "RMSprop")]
)
def test_a_checkpoint_of_another_optimizer_is_refused(written: str, now: str, tmp_path: Path) -> None:
    cluster(lambda worker: saved(worker, RULES[written], tmp_path), 2)
    says = rf"was written with {written}, but this session has {now},.*Build {written}\(model\.parameters\(\)"
    with pytest.raises(CheckpointError, match=says):
        cluster(lambda worker: loaded(worker, RULES[now], tmp_path), 2)
    cluster(lambda worker: loaded(worker, RULES[written], tmp_path), 2)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("rule", [NAdam, ASGD])
def test_numbers_of_an_optimizer_are_loaded_in_their_dtype(rule: Rule, tracked: bool, tmp_path: Path) -> None:
    """torch's own load_state_dict casts them to the parameters' dtype, here float64."""

    def work(worker: Worker, resumes: bool) -> Tensor:
        model = network(3 if resumes else 0)
        optimizer, other = rule(model.parameters()), SGD(model.parameters(), 0.1)
        session = worker.attach(model, other if tracked else optimizer, "Dense()")
        if tracked:
            session.track(second=optimizer)
        if resumes:
            session.load(tmp_path)
        for step in range(2 if resumes else 0, 8):
            train_step(model, optimizer, step, worker.rank)
            if step == 1 and not resumes:
                session.save(tmp_path)
        return parameters(model)

    whole, resumed = (cluster(lambda worker, r=r: work(worker, r), 2) for r in (False, True))
    assert torch.equal(whole[0], resumed[0])


def test_without_that_it_would_end_in_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_checkpoint, "refuse_other_optimizer", lambda tree, optimizer: None)
    with pytest.raises(KeyError, match="momentum"):
        test_a_checkpoint_of_another_optimizer_is_refused("Adam", "SGD", tmp_path)


@pytest.mark.parametrize(
    "states", [(), (None,), (3,), ("x",), ([],), ({},), ({"passes": 1},), ({"rank": "0"},)], ids=repr
)
def test_an_invalid_state_is_named(states: tuple[Any, ...]) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, SGD(model.parameters(), 0.1)).load_state_dict(*states)

    with pytest.raises(
        CheckpointError, match=r"needs a result of session\.state_dict\(\): the state .*session\.load\("
    ):
        cluster(work, 2)


def test_channels_last_parameters_continue_with_their_optimizer_state_in_that_order(tmp_path: Path) -> None:
    """In bfloat16, SGD computes other bits on state with other strides than those of the parameter."""

    def work(worker: Worker, first: int, last: int, saves: bool) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(8, 16, 3).to(torch.bfloat16, memory_format=torch.channels_last)
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        session = worker.attach(model, optimizer, "Dense()")
        if first:
            session.load(tmp_path)
        found = []
        for step in range(first, last):
            if saves and step == 4:
                session.save(tmp_path)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(2, 8, 6, 6, generator=generator).to(torch.bfloat16, memory_format=torch.channels_last)
            model(x).square().mean().backward()
            optimizer.step()
            found.append(model.weight.detach().clone())
        return found, [optimizer.state[p]["momentum_buffer"].stride() for p in model.parameters()]

    (whole, strides), (resumed, again) = (
        cluster(lambda worker, a=arguments: work(worker, *a), 1)[0] for arguments in ((0, 8, True), (4, 8, False))
    )
    assert strides == again != [(72, 9, 3, 1), (1,)]
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], resumed, strict=True))


class Part:
    """Fails where it is saved."""

    def state_dict(self) -> dict[str, Any]:
        raise TypeError("nothing to save here")


def scaled_steps(worker: Worker, folder: Path, *, load: bool, passed: bool = False, used: bool = False) -> list[float]:
    """Three steps with a GradScaler that doubles its scale after two of them. Returns the scale after each step.

    Args:
        load: whether to load a checkpoint from `folder` before the steps; else one is saved after them.
        passed: whether the scaler is passed to attach.
        used: whether the scaler scales an output before the load.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    options = {"scaler": scaler} if passed else {}
    model, optimizer, session = worker.start(network(dtype=torch.float32), sgd, "Dense()", **options)
    if used:
        scaler.scale(torch.ones(1))
    if load:
        session.load(folder)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, worker.rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    if not load:
        session.save(folder)
    return scales


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("passed", [False, True])
def test_the_scale_of_a_scaler_continues_after_a_load(passed: bool, world: int, tmp_path: Path) -> None:
    """Also if attach was not given the scaler, which the session then finds after the load."""
    assert cluster(lambda worker: scaled_steps(worker, tmp_path, load=False, passed=passed), world)[0] == [8, 16, 16]
    with notices() as said:
        found = cluster(lambda worker: scaled_steps(worker, tmp_path, load=True, passed=passed), world)
    assert found == [[32, 32, 64]] * world
    assert said == []


def test_the_scale_is_saved_again_before_the_scaler_is_found(tmp_path: Path) -> None:
    def load_and_save(worker: Worker) -> None:
        _, _, session = worker.start(network(dtype=torch.float32), sgd, "Dense()")
        session.load(tmp_path)
        session.save(tmp_path)

    cluster(lambda worker: scaled_steps(worker, tmp_path, load=False), 2)
    cluster(load_and_save, 2)
    assert cluster(lambda worker: scaled_steps(worker, tmp_path, load=True), 2) == [[32, 32, 64]] * 2


def test_a_scale_that_cannot_be_restored_is_reported_once(tmp_path: Path) -> None:
    cluster(lambda worker: scaled_steps(worker, tmp_path, load=False), 2)
    with notices() as said:
        assert cluster(lambda worker: scaled_steps(worker, tmp_path, load=True, used=True), 2) == [[8, 16, 16]] * 2
    assert ["scaler=scaler) before session.load()" in line for line in said] == [True]


def test_failed_save_on_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    """The others would wait for it otherwise."""

    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, SGD(model.parameters(), 0.1))
        with pytest.raises(CheckpointError, match="rank 1: nothing to save here"):
            session.save(tmp_path, part=Part() if worker.rank else 0)

    cluster(work, 2)


def test_save_into_a_file_raises_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, SGD(model.parameters(), 0.1))
        with pytest.raises(CheckpointError, match=r"rank 1: .*(Not a directory|File exists)"):
            session.save(tmp_path / ("file" if worker.rank else "folder"))

    cluster(work, 2)


class WrappedScheduler:
    """As AcceleratedScheduler: the scheduler lies in it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


@pytest.mark.parametrize("tracked", [True, False])
def test_a_scheduler_in_a_wrapper_is_one(tracked: bool, tmp_path: Path) -> None:
    model = network(0)
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def work(worker: Worker) -> None:
        session = worker.attach(model, optimizer)
        if tracked:
            session.track(scheduler=WrappedScheduler(scheduler))
        holds_itself: list[Any] = []
        holds_itself.append(holds_itself)
        with pytest.raises(CheckpointError, match="contains itself"):
            session.save(tmp_path, list=holds_itself)

    with notices() as said:
        cluster(work, 1)
    assert ["has a learning rate scheduler that is not" in line for line in said] == [True] * (not tracked)


# -- Session checkpointing: how many stay, options that are alike on all ranks, and saves beside training --------------


def trained(worker: Worker) -> tuple[Session, Any]:
    model = network(worker.rank)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = worker.attach(model, optimizer, "TopK(density=0.2)")
    return session, lambda step: train_step(model, optimizer, step, worker.rank)


@pytest.mark.parametrize(("options", "stay"), [({}, [4, 5]), ({"keep": 3}, [3, 4, 5]), ({"keep": 1}, [5])])
def test_the_newest_stay(options: dict[str, int], stay: list[int], tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        session, train = trained(worker)
        for step in range(5):
            train(step)
            session.save(tmp_path, **options)

    cluster(work, 2)
    assert [checkpoint.complete_steps(tmp_path, rank) for rank in range(2)] == [stay, stay]
    assert len(list(tmp_path.iterdir())) == len(stay)


@pytest.mark.parametrize("keep", [0, -1, "best", 2.5, True, None])
def test_an_invalid_number_to_keep_is_refused_on_all_ranks(keep: Any, tmp_path: Path) -> None:
    """Such as a value of the user's own, from when `keep` was no option."""

    def work(worker: Worker) -> None:
        session, _ = trained(worker)
        says = r"keep is the number of checkpoints.*another name than"
        with pytest.raises(CheckpointError, match=says if worker.rank == 0 else "different options"):
            session.save(tmp_path, keep=2 if worker.rank else keep)
        with pytest.raises(CheckpointError, match=says):
            session.save(tmp_path, keep=keep)
        session.save(tmp_path)

    cluster(work, 2)
    assert checkpoint.complete_steps(tmp_path, 1) == [0]


def test_other_options_on_another_rank_are_refused(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        session, _ = trained(worker)
        with pytest.raises(CheckpointError, match=r"rank 0: SaveOptions\(keep=2.*rank 1: SaveOptions\(keep=3"):
            session.save(tmp_path, keep=2 + worker.rank)

    cluster(work, 2)
    assert not list(tmp_path.iterdir())


# -- asynchronous ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Parts are written once it is set."""
    opened, honest = threading.Event(), checkpoint.stage

    def stage(*args: Any) -> str:
        assert opened.wait(30)
        return honest(*args)

    monkeypatch.setattr(checkpoint, "stage", stage)
    return opened


def saved_beside(folder: Path, gate: threading.Event, world: int = 2) -> list[Any]:
    """(parameters at the save, those after a step more), by rank; the save ends after that step."""
    barrier = threading.Barrier(world)

    def work(worker: Worker) -> Any:
        session, train = trained(worker)
        train(0)
        session.save(folder, asynchronous=True, mine=torch.ones(2))
        then = parameters(session.model)
        assert not checkpoint.complete_steps(folder, worker.rank)
        train(1)
        barrier.wait()
        gate.set()
        session.close()
        return then, parameters(session.model)

    return cluster(work, world)


def loaded_values(folder: Path, world: int = 2) -> list[Any]:
    """(step, parameters, what was the user's), by rank."""

    def work(worker: Worker) -> Any:
        session, _ = trained(worker)
        mine = session.load(folder)
        return session.steps, parameters(session.model), mine

    return cluster(work, world)


def check_what_was_then(folder: Path, gate: threading.Event) -> None:
    with heard(events.Saved) as told:
        then = saved_beside(folder, gate)
    assert {event.step for event in told} == {1}
    for (step, found, mine), (before, after) in zip(loaded_values(folder), then, strict=True):
        assert step == 1
        assert not torch.equal(before, after)
        assert torch.equal(found, before), "it holds what was trained later"
        assert torch.equal(mine["mine"], torch.ones(2))


def test_asynchronous_save_contains_the_state_at_the_call(tmp_path: Path, gate: threading.Event) -> None:
    check_what_was_then(tmp_path, gate)


def test_mutant_without_copy_saves_later_state(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapshotBuffers, "copy", lambda self, tree: Flat.of(tree))
    with pytest.raises(AssertionError, match="trained later"):
        check_what_was_then(tmp_path, gate)


def resumed(folder: Path, recipe: str, world: int, asynchronous: bool) -> None:
    """2 + 3 steps are 5 steps."""

    def work(worker: Worker, stop: int, save: bool) -> Any:
        model = network(worker.rank)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        session = worker.attach(model, optimizer, recipe)
        session.load(folder)
        for step in range(session.steps, stop):
            train_step(model, optimizer, step, worker.rank)
        if save:
            session.save(folder, asynchronous=asynchronous)
            train_step(model, optimizer, stop, worker.rank)
            session.close()
        return parameters(model)

    whole = cluster(lambda worker: work(worker, 5, False), world)
    cluster(lambda worker: work(worker, 2, True), world)
    for one, other in zip(whole, cluster(lambda worker: work(worker, 5, False), world), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "PowerSGD(rank=2)", "LocalSGD(period=2)"])
@pytest.mark.parametrize("world", [1, 3])
def test_promise_17_resuming_is_bit_exact(recipe: str, world: int, tmp_path: Path) -> None:
    resumed(tmp_path, recipe, world, asynchronous=True)


def test_the_next_save_waits_and_reports_it(tmp_path: Path, gate: threading.Event) -> None:
    def work(worker: Worker) -> None:
        session, train = trained(worker)
        train(0)
        session.status.step_seconds = 0.0
        session.save(tmp_path, asynchronous=True)
        if worker.rank == 0:
            threading.Timer(0.05, gate.set).start()
        session.save(tmp_path, asynchronous=True)
        session.close()

    with notices() as said:
        cluster(work, 2)
    assert ["was still being written when the next was to be saved" in line for line in said] == [True]


def test_no_notice_if_save_completed_in_time(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        session, train = trained(worker)
        for step in range(3):
            train(step)
            session.save(tmp_path, asynchronous=True)
            pending = session._checkpoints._pending
            assert pending is not None
            pending.wait()
        session.close()

    with notices() as said:
        cluster(work, 2)
    assert said == []
    assert checkpoint.complete_steps(tmp_path, 1) == [2, 3]


@pytest.mark.parametrize("at", ["save", "load", "close"])
def test_an_error_of_the_writer_is_raised_on_all_ranks(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = checkpoint.stage

    def full(directory: Any, step: int, rank: int, tree: Any) -> str:
        if step == 2 and rank == 1:
            raise OSError(28, "No space left on device")
        return honest(directory, step, rank, tree)

    monkeypatch.setattr(checkpoint, "stage", full)

    def work(worker: Worker) -> None:
        session, train = trained(worker)
        for step in range(2):
            train(step)
            session.save(tmp_path, asynchronous=True, keep=1)
        with pytest.raises(CheckpointError, match=r"of step 2.*rank 1: .*No space left on device") as caught:
            {"save": lambda: session.save(tmp_path), "load": lambda: session.load(tmp_path), "close": session.close}[
                at
            ]()
        assert isinstance(caught.value.__cause__, OSError) == (worker.rank == 1)
        if at == "save":
            train(2)
            session.save(tmp_path, asynchronous=True)
            session.close()

    with heard(events.Saved) as told:
        cluster(work, 2)
    assert {event.step for event in told} == ({1, 3} if at == "save" else {1})
    assert loaded_values(tmp_path)[0][0] == (3 if at == "save" else 1)


def test_a_run_that_dies_meanwhile_continues_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = checkpoint.complete

    def dies(directory: Any, step: int, rank: int, *rest: Any, **options: Any) -> None:
        if (step, rank) != (2, 1):
            honest(directory, step, rank, *rest, **options)

    monkeypatch.setattr(checkpoint, "complete", dies)

    def work(worker: Worker) -> None:
        session, train = trained(worker)
        for step in range(2):
            train(step)
            session.save(tmp_path, asynchronous=True, keep=1)
        pending = session._checkpoints._pending
        assert pending is not None
        pending.wait()

    cluster(work, 2)
    assert checkpoint.complete_steps(tmp_path, 0) == [1, 2]
    assert loaded_values(tmp_path)[0][0] == 1


def test_a_run_that_dies_once_all_parts_are_there_continues_from_them(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        session, train = trained(worker)
        train(0)
        session.save(tmp_path, asynchronous=True)
        pending = session._checkpoints._pending
        assert pending is not None
        pending.wait()

    cluster(work, 2)
    assert loaded_values(tmp_path)[0][0] == 1
    assert loaded_values(tmp_path, 3)[0][0] == 1


def test_parts_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    kept = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        for step in (1, 2):
            saved = folder / "kept"

            def work(worker: Worker, step: int = step, saved: Path = saved) -> None:
                session, train = trained(worker)
                session.load(saved)
                train(step)
                session.save(saved, asynchronous=True)
                session.close()

            cluster(work, 2)
        kept.append(saved)
    for name in ("rank-0.json", "rank-0.safetensors"):
        shutil.copy(kept[1] / "step-00000002" / name, kept[0] / "step-00000002" / name)
    with notices() as said:
        assert loaded_values(kept[0])[0][0] == 1
    assert any("step 2 has parts of two saves" in line for line in said)


@pytest.mark.parametrize("asynchronous", [None, 1, "yes", torch.ones(1)], ids=repr)
def test_asynchronous_that_is_no_bool_is_refused(asynchronous: Any, tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        session, _ = trained(worker)
        with pytest.raises(CheckpointError, match=r"asynchronous must be True or False.*another name"):
            session.save(tmp_path, asynchronous=asynchronous)

    cluster(work, 2)


def test_failing_session_reports_the_unwritten_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "stage", full)

    def work(worker: Worker) -> None:
        session, _ = trained(worker)
        session.save(tmp_path, asynchronous=True)
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError

    with notices() as said:
        cluster(work, 2)
    assert ["of step 0 was not written: " in line for line in said] == [True, True]
