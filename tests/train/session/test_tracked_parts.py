"""Tracked parts: what a loop steps beside model and optimizer is saved and resumed, or named where it is missing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nightly import nightly, once_each
from support.processes import succeed
from support.sessions import sgd
from support.tracked_training import BATCHES, EPOCHS, Training
from support.virtual_workers import Worker, cluster, loss_of, network, notices, train_step
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    SequentialLR,
)
from torch.utils.data import DataLoader

import gossamer.train.session.attach as attaching
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError, CheckpointError, LoopError, MismatchError
from gossamer.train.session.session import Session
from gossamer.train.session.tracked_parts import TrackedParts, explained, functions_text, refuse_other_functions
from gossamer.train.world_state import WorldState

RECIPE = "TopK(density=0.3)"


def trained(worker: Worker, directory: Path | None, stop: int | None, **options: Any) -> tuple[Tensor, list[Tensor]]:
    with torch.random.fork_rng():
        training = Training(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    world = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    session = Session(training.model, training.optimizer, resolve(RECIPE), worker.transport, world=world)
    worker.sessions.append(session)
    parameters = training.run(session, world, directory, stop, **options)
    return parameters, training.seen


@pytest.mark.parametrize("stop", [BATCHES, *nightly(2, BATCHES + 1)])
def test_a_resumed_run_is_the_run(stop: int, tmp_path: Path) -> None:
    """With loaders' workers, two optimizers and two schedulers; in mid-epoch, at its end, and in the next one."""
    options = {"num_workers": 1, "persistent_workers": True}
    whole = cluster(lambda worker: trained(worker, None, None, **options), 2)
    with notices() as said:
        cluster(lambda worker: trained(worker, tmp_path, stop, **options), 2)
        resumed = cluster(lambda worker: trained(worker, tmp_path, None, **options), 2)
    assert said == []
    for (parameters, seen), (again, rest) in zip(whole, resumed, strict=True):
        assert len(seen) == EPOCHS * BATCHES
        assert torch.equal(torch.stack(seen[stop:]), torch.stack(rest))
        assert torch.equal(parameters, again)


@pytest.mark.processes
def test_two_processes_with_dropout_resume_bit_for_bit(tmp_path: Path) -> None:
    module = ["-m", "support.tracked_training"]
    whole = succeed([*module, str(tmp_path / "kept"), "7"], 2)
    resumed = succeed([*module, str(tmp_path / "kept"), "0"], 2)
    digests = [{line.split()[1] for line in said[0].splitlines()[-1:]} for said in (whole, resumed)]
    assert digests[0] == digests[1] != set()
    assert resumed[0].split()[-2:] == ["15", "8"]


# -- one part at a time ------------------------------------------------------------------------------------------------


class Average:
    """An exponential average of parameters, as many loops keep one."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def session_of(worker: Worker) -> Session:
    return worker.start(network(worker.rank), lambda model: torch.optim.SGD(model.parameters(), 0.1))[2]


def test_anything_with_a_state_is_tracked(tmp_path: Path) -> None:
    def work(worker: Worker, value: float, load: bool) -> float:
        session, average = session_of(worker), Average()
        average.value = value
        assert session.track(average=average) is average
        if load:
            session.load(tmp_path)
        else:
            session.save(tmp_path)
        return average.value

    cluster(lambda worker: work(worker, 7.0 + worker.rank, load=False), 2)
    assert cluster(lambda worker: work(worker, 0.0, load=True), 2) == [7.0, 8.0]


def test_names_that_one_side_alone_has_are_reported(tmp_path: Path) -> None:
    def work(worker: Worker, name: str, load: bool) -> None:
        session = session_of(worker)
        session.track(**{name: Average()})
        if load:
            session.load(tmp_path)
        else:
            session.save(tmp_path)

    cluster(lambda worker: work(worker, "one", load=False), 2)
    with notices() as said:
        cluster(lambda worker: work(worker, "other", load=True), 2)
    assert [line for line in said if "state of one, which this run does not track" in line]
    assert [line for line in said if "no state of other" in line]
    assert len(said) == 2  # by one rank


def test_invalid_calls_of_track_are_refused(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        session = session_of(worker)
        for call, message in (
            (lambda: session.track(), "one object by its name"),
            (lambda: session.track(a=Average(), b=Average()), r"got 2.*session.track\(a=a\); session.track\(b=b\)"),
            (
                lambda: session.track(step=3),
                r"step is a int.*session\.save\(directory, name=value\)",
            ),
        ):
            with pytest.raises(AttachError, match=message):
                call()
        session.track(average=Average())
        with pytest.raises(AttachError, match="already"):
            session.track(average=Average())
        session.save(tmp_path)

    def too_late(worker: Worker) -> None:
        session = session_of(worker)
        session.load(tmp_path)
        with pytest.raises(LoopError, match=r"load\(\) was called before session\.track\(average"):
            session.track(average=Average())

    cluster(work, 1)
    cluster(too_late, 1)


def test_a_part_that_does_not_fit_is_a_checkpoint_error(tmp_path: Path) -> None:
    def work(worker: Worker, size: int, load: bool) -> None:
        session = session_of(worker)
        session.track(second=torch.optim.SGD(nn.Linear(size, 1).parameters(), 0.1))
        session.track(third=torch.optim.SGD(nn.ModuleList(nn.Linear(1, 1) for _ in range(size)).parameters(), 0.1))
        if load:
            session.load(tmp_path)
        else:
            session.save(tmp_path)

    cluster(lambda worker: work(worker, 2, load=False), 1)
    with pytest.raises(CheckpointError, match="do not fit this run"):
        cluster(lambda worker: work(worker, 3, load=True), 1)


# -- what is missing ---------------------------------------------------------------------------------------------------


def saved_with(make: Any, tmp_path: Path, world: int = 2) -> list[str]:
    """What is told as a session saves twice; make(model, optimizer, session): what else there is, as `mine`."""

    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), lambda model: torch.optim.SGD(model.parameters(), 0.1))
        mine = make(model, optimizer, session)
        for step in range(2):
            train_step(model, optimizer, step, worker.rank)
            for other in mine.pop("also", []):
                other.step()
            session.save(tmp_path, **mine)

    with notices() as said:
        cluster(work, world)
    return said


def only(*_: Any) -> dict[str, Any]:
    """Nothing is saved as `mine`, whatever else was done."""
    return {}


def step_rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda model, optimizer, session: {}, 0),
        (lambda model, optimizer, session: only(step_rate(optimizer)), 1),
        (lambda model, optimizer, session: {"scheduler": step_rate(optimizer)}, 0),
        (lambda model, optimizer, session: {"parts": [step_rate(optimizer).state_dict()]}, 0),
        (lambda model, optimizer, session: only(session.track(scheduler=step_rate(optimizer))), 0),
        (lambda model, optimizer, session: only(setattr(optimizer, "scheduler", step_rate(optimizer))), 0),
    ],
)
def test_untracked_scheduler_is_reported_once(make: Any, told: int, tmp_path: Path) -> None:
    said = saved_with(make, tmp_path)
    assert len(said) == told
    assert all("learning rate scheduler that is not in the checkpoint" in line for line in said)


def head(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[4].parameters(), 0.01)


def with_second(keep: Any) -> Any:
    def make(model: nn.Sequential, optimizer: torch.optim.Optimizer, session: Session) -> dict[str, Any]:
        second = head(model)
        return {"also": [second], **keep(second, session)}

    return make


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (lambda second, session: {}, 1),
        (lambda second, session: {"second": second}, 0),
        (lambda second, session: {"second": second.state_dict()}, 0),
        (lambda second, session: only(session.track(second=second)), 0),
    ],
)
def test_untracked_second_optimizer_is_reported_once(keep: Any, told: int, world: int, tmp_path: Path) -> None:
    said = saved_with(with_second(keep), tmp_path, world)
    assert len(said) == told
    assert all("AdamW also trains 4.weight, 4.bias" in line for line in said)


class Wrapper(torch.optim.Optimizer):
    """Steps through another optimizer, as Lookahead does. delegates: state_dict() is that of the inner one."""

    def __init__(self, inner: torch.optim.Optimizer, *, delegates: bool) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.delegates = inner, delegates

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() if self.delegates else super().state_dict()


@pytest.mark.parametrize(("momentum", "delegates", "told"), [(0.9, False, 1), (0.9, True, 0), (0.0, False, 0)])
def test_state_of_an_inner_optimizer_that_is_not_saved_is_reported(
    momentum: float, delegates: bool, told: int, tmp_path: Path
) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        session = worker.attach(model, optimizer := Wrapper(inner, delegates=delegates))
        train_step(model, optimizer, 0, worker.rank)
        session.save(tmp_path)

    with notices() as said:
        cluster(work, 2)
    assert len(said) == told
    assert all("SGD also trains 0.weight" in line and "session.track(second=optimizer)" in line for line in said)


def test_optimizer_of_another_model_is_not_reported(tmp_path: Path) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    assert saved_with(lambda model, optimizer, session: {"also": [other]}, tmp_path) == []


def test_a_scheduler_that_hangs_on_the_optimizer_is_saved(tmp_path: Path) -> None:
    def work(worker: Worker, load: bool) -> int:
        model, optimizer, session = worker.start(network(0), lambda model: torch.optim.SGD(model.parameters(), 0.1))
        optimizer.lr_scheduler = step_rate(optimizer)  # type: ignore[attr-defined]
        if load:
            session.load(tmp_path)
        else:
            train_step(model, optimizer, 0, worker.rank)
            optimizer.lr_scheduler.step()  # type: ignore[attr-defined]
            session.save(tmp_path)
        return int(optimizer.lr_scheduler.last_epoch)  # type: ignore[attr-defined]

    cluster(lambda worker: work(worker, load=False), 1)
    assert cluster(lambda worker: work(worker, load=True), 1) == [1]


def test_milestones_that_follow_a_warm_up_resume(tmp_path: Path) -> None:
    """torch reads the Counter of MultiStepLR where SequentialLR begins it, here after the load."""

    def work(worker: Worker, resumes: bool) -> list[float]:
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        scheduler = SequentialLR(optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [1, 2])], milestones=[3])
        session.track(scheduler=scheduler)
        if resumes:
            session.load(tmp_path)
        rates = []
        for step in range(2 if resumes else 0, 7):
            train_step(model, optimizer, step, worker.rank)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if step == 1 and not resumes:
                session.save(tmp_path)
        return rates

    (whole,), (resumed,) = (cluster(lambda worker, r=r: work(worker, r), 1) for r in (False, True))
    assert resumed == whole[2:]


def test_attach_takes_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    world = WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    monkeypatch.setattr(attaching, "current", lambda: world)
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = step_rate(optimizer)
    with attaching.attach(model, optimizer, scheduler=scheduler) as session:
        assert session._tracked.state_dict()["scheduler"] == scheduler.state_dict()


# -- loaders that have a state of their own ----------------------------------------------------------------------------


class StatefulLoader(DataLoader[Any]):
    """As torchdata's: takes the sampler's state as each batch was asked for, and gives it back before it goes on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked: dict[int, dict[str, int]] = {}
        self._given = 0
        self._next: dict[str, Any] | None = None
        sampler, asked = self.sampler, self._asked

        class Asking(type(self.batch_sampler)):  # type: ignore[misc]
            def __iter__(self) -> Iterator[Any]:
                for count, batch in enumerate(super().__iter__(), 1):
                    asked[count] = sampler.state_dict()
                    yield batch

        object.__setattr__(self, "batch_sampler", Asking(sampler, self.batch_size, self.drop_last))

    def __iter__(self) -> Any:
        iter(self.sampler)  # it makes one that it does not use
        if self._next is not None:
            self.sampler.load_state_dict(self._next["sampler"])  # type: ignore[attr-defined]
            self._next = None
        for self._given, batch in enumerate(super().__iter__(), 1):
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self._asked[self._given]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state


def test_a_stateful_loader_over_a_shard_is_counted(tmp_path: Path) -> None:
    """As any other; what it would restore of the shard's position does not count on top."""
    data = torch.arange(40)

    def work(worker: Worker, stop: int | None) -> list[list[int]]:
        model = network(0)
        world = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        session = Session(model, optimizer, resolve(None), worker.transport, world=world)
        worker.sessions.append(session)
        loader = StatefulLoader(data, 4, sampler=world.shard(data), num_workers=1)
        loader = session.track(loader)
        session.load(tmp_path)
        seen: list[list[int]] = []
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == stop:
                session.save(tmp_path)
                break
        return seen

    whole = cluster(lambda worker: work(worker, None), 2)
    with notices() as said:
        cluster(lambda worker: work(worker, 2), 2)
        resumed = cluster(lambda worker: work(worker, None), 2)
    assert said == []
    assert resumed == [seen[2:] for seen in whole]


@pytest.mark.parametrize("resharded", [False, True])
def test_other_workers_do_not_take_over_a_loaders_own_state(resharded: bool) -> None:
    """It stood where another number of workers had come; the world's shards are folded, and schedulers are alike."""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts, average = TrackedParts(model, optimizer, gives_notice=True), Average()
    loader = StatefulLoader(torch.arange(8), 2)
    parts.track(loader, {})
    parts.track(None, {"average": average})
    parts.load_state_dict({"loader 0": {"sampler": {}}, "average": {"value": 3.0}}, resharded=resharded)
    assert average.value == 3.0
    assert (loader._next is None) is resharded


@pytest.mark.parametrize(("accumulates", "told"), [(True, 1), (False, 0)])
def test_a_save_within_an_accumulation_is_one_notice(accumulates: bool, told: int, tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd)
        for number in range(6):
            with nullcontext() if number % 2 else session.no_sync():
                loss_of(model, number, worker.rank).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            if accumulates or number % 2:
                session.save(tmp_path)

    with notices() as said:
        cluster(work, 2)
    assert len(said) == told
    assert all("no_sync" in line and "optimizer.step()" in line for line in said)


# -- Schedule functions: two schedulers have the same text exactly where their functions return the same factors


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)


def cosine(step: int, *, length: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / length)))


def stairs(step: int, *, length: int) -> float:
    return float(0.1 ** (step // length))


def table(step: int, *, length: int) -> float:
    return [1.0, 0.5, 0.25, *[0.1] * length][step]


def chained(rule: Any) -> LRScheduler:
    made = optimizer()
    return SequentialLR(made, [CosineAnnealingLR(made, 5), LambdaLR(made, rule)], milestones=[3])


SHAPES: list[Callable[..., float]] = [cosine, stairs, table]
KINDS: list[Callable[[Any], Any]] = [
    lambda rule: LambdaLR(optimizer(), rule),
    lambda rule: MultiplicativeLR(optimizer(), rule),
    chained,
    lambda rule: SimpleNamespace(scheduler=LambdaLR(optimizer(), rule)),
]


@once_each("kind, shape, length", KINDS, SHAPES, [3, 600, 61_000])
def test_functions_with_another_length_have_another_text(kind: Any, shape: Any, length: int) -> None:
    def text(length: int) -> str:
        return functions_text(kind(functools.partial(shape, length=length)))

    assert text(length) == text(length) != ""
    assert text(length) != text(length + math.ceil(length / 50))
    assert functions_text(kind(lambda step: shape(step, length=length))) == text(length)


@pytest.mark.parametrize("scheduler", [CosineAnnealingLR(optimizer(), 5), object(), SimpleNamespace(lr_lambdas=())])
def test_a_scheduler_without_functions_has_no_text(scheduler: Any) -> None:
    assert functions_text(scheduler) == ""
    refuse_other_functions("scheduler", scheduler, {})


def test_refusal_names_both_factors_and_the_remedy() -> None:
    mine, theirs = (LambdaLR(optimizer(), functools.partial(cosine, length=length)) for length in (420, 600))
    others = {"functions of warmup": functions_text(theirs)}
    refuse_other_functions("warmup", theirs, others)
    with pytest.raises(MismatchError, match=r"warmup return factors 0\.99998\d* at step 1.*total = 10_000"):
        refuse_other_functions("warmup", mine, others)
    with pytest.raises(MismatchError, match="and nothing on the workers"):
        refuse_other_functions("other", mine, others)


@pytest.mark.parametrize("adds", [True, False])
def test_remedy_is_added_to_refusals_about_functions_only(adds: bool) -> None:
    with pytest.raises(MismatchError) as refusal, explained():
        raise MismatchError("They differ in functions of scheduler" if adds else "They differ in torch")
    assert ("len(loader)" in str(refusal.value)) == adds
