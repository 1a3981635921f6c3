"""Auto recipe: real sessions of virtual workers, whose clocks say what a planted network would take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_workers
from support.virtual_workers import Worker, agree, cluster, loss_of, network, parameters, train_step
from torch.optim import SGD, AdamW, RMSprop

from gossamer import events
from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.errors import AttachError
from gossamer.train.auto.decision import decide
from gossamer.train.auto.measurement import Measurement, StepSeconds
from gossamer.train.auto.rule import Rule
from gossamer.train.session.auto_recipe import (
    PART,
    RecipeChoice,
    choose_while_training,
    first_recipe,
    refuse_fixed_choice,
)
from gossamer.train.session.session import Session

COMPUTING = 0.1  # virtual seconds of a step
SECONDS_PER_BYTE = 1e-4  # a slow line: a Dense() step of the small network takes half a second more
ANY, RUNGS_OF_GRADIENTS = Auto(), Auto(local_steps=False)


@dataclass
class VirtualClock:
    """One worker's time: a step takes what its bytes take on the line in force."""

    seconds_per_byte: Callable[[int], float]  # after so many steps
    late: float = 0.0  # of computing more
    tick: float = 0.0  # that passes whenever somebody looks at the clock, so that looks take time
    steps: int = 0
    now: float = 0.0
    changes: list[tuple[int, str, str]] = field(default_factory=list)

    def timed(self, seconds: float, costs: Any) -> StepSeconds:
        self.steps += 1
        wire = costs.get("bytes_sent", 0.0) * self.seconds_per_byte(self.steps)
        took = COMPUTING + self.late + wire
        self.now += took
        return StepSeconds(took, wire, wire, 0.0)

    def put_into(self, session: Session) -> None:
        session.status.clock, session.status.timed = self.looked_at, self.timed

    def looked_at(self) -> float:
        self.now += self.tick
        return self.now


def slow(step: int) -> float:
    return SECONDS_PER_BYTE


def fast(step: int) -> float:
    return 1e-9


@pytest.fixture
def switched() -> Iterator[list[events.RecipeSwitched]]:
    heard: list[events.RecipeSwitched] = []
    end = events.subscribe(lambda event: heard.append(event) if isinstance(event, events.RecipeSwitched) else None)
    yield heard
    end()


def momentum_sgd(parameters: Any) -> SGD:
    return SGD(parameters, 0.05, momentum=0.9)


def begin(
    worker: Worker,
    line: Callable[[int], float],
    auto: Auto,
    rule: Rule | None = None,
    optimizer: Callable[..., Any] = momentum_sgd,
    **clock: Any,
) -> Any:
    model = network(worker.rank)
    optimizer = optimizer(model.parameters())
    session = worker.attach(model, optimizer, auto)
    VirtualClock(line, **clock).put_into(session)
    choose_while_training(session, auto, rule)
    return model, optimizer, session


def train(
    worker: Worker, line: Callable[[int], float], steps: int, auto: Auto = ANY, **clock: Any
) -> tuple[torch.Tensor, list[str]]:
    model, optimizer, session = begin(worker, line, auto, **clock)
    recipes = []
    for step in range(steps):
        train_step(model, optimizer, step, worker.rank)
        recipes.append(repr(session.recipe))
    return parameters(model), recipes


def test_on_a_slow_line_all_ranks_compress_alike_and_stay_equal(switched: list[events.RecipeSwitched]) -> None:
    auto = Auto(local_steps=False)
    found = cluster(lambda worker: train(worker, slow, 40, auto), 2)
    agree([trained for trained, _ in found])
    assert found[0][1] == found[1][1]
    assert found[0][1][-1] != repr(Recipe())
    assert len(switched) == 2 * len({*found[0][1]}) - 2
    assert all("estimated" in event.reason for event in switched)


def test_on_a_fast_line_nothing_happens(switched: list[events.RecipeSwitched]) -> None:
    found = cluster(lambda worker: train(worker, fast, 40), 2)
    assert {*found[0][1]} == {repr(Recipe())}
    assert not switched


@pytest.mark.parametrize(
    ("optimizer", "auto", "chosen"),
    [
        (AdamW, Auto(steps=20_000), "OneBit()"),
        (AdamW, Auto(), "Float4()"),
        (RMSprop, Auto(steps=20_000), "Float4()"),  # its momentum cannot be aligned
    ],
)
def test_a_long_training_averages_parameters_in_one_bit(optimizer: type, auto: Auto, chosen: str) -> None:
    steps = 3 + 80  # until the first change, and whole periods
    found = cluster(lambda worker: train(worker, slow, steps, auto, optimizer=optimizer), 2)
    agree([trained for trained, _ in found])
    assert found[0][1] == found[1][1]
    assert chosen in found[0][1][-1]


def test_the_choice_follows_the_line_there_and_back(switched: list[events.RecipeSwitched]) -> None:
    def line(step: int) -> float:
        return slow(step) if 20 < step <= 60 else fast(step)

    found = cluster(lambda worker: train(worker, line, 160, Auto(local_steps=False)), 2)
    recipes = found[0][1]
    assert recipes[15] == recipes[-1] == repr(Recipe())
    assert recipes[55] != repr(Recipe())
    agree([trained for trained, _ in found])


def steps_until_the_change() -> int:
    """After the line has broken down, with looks that are dear, and so many steps apart."""

    def line(step: int) -> float:
        return 20 * slow(step) if step > 56 else fast(step)

    found = cluster(lambda worker: train(worker, line, 100, Auto(local_steps=False), tick=0.001), 3)
    agree([trained for trained, _ in found])
    recipes = found[0][1]
    assert recipes == found[1][1] == found[2][1]
    assert recipes[56] == repr(Recipe()) != recipes[-1]
    return next(step for step, recipe in enumerate(recipes) if recipe != repr(Recipe())) - 55


def test_a_slow_step_asks_all_ranks_for_a_look() -> None:
    assert steps_until_the_change() == 2


def test_mutant_without_a_request_in_the_report_changes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.train.engine.step_decision.LOOK", 0)
    assert steps_until_the_change() > 2


def test_unequal_numbers_of_its_own_move_no_rank_alone(switched: list[events.RecipeSwitched]) -> None:
    """Each rank sees another line and another pace; all go the same way."""

    def work(worker: Worker) -> Any:
        return train(worker, lambda step: SECONDS_PER_BYTE * (1 + worker.rank), 60, late=0.3 * worker.rank)

    found = cluster(work, 3)
    assert found[0][1] == found[1][1] == found[2][1]
    assert switched


def test_local_steps_are_taken_where_bytes_are_dear_and_merged_alike() -> None:
    found = cluster(lambda worker: train(worker, lambda step: 1.0, 201), 2)
    assert any("DiLoCo" in recipe for recipe in found[0][1])
    assert found[0][1] == found[1][1]


def test_ranks_with_unequal_data_look_only_where_all_train(switched: list[events.RecipeSwitched]) -> None:
    """The one that is out of data keeps the others company, and comes to no look."""

    def work(worker: Worker) -> Any:
        model, optimizer, session = begin(worker, slow, Auto(local_steps=False))
        for epoch in range(3):
            with session.epoch():
                for step in range(8 + 3 * worker.rank):
                    train_step(model, optimizer, 20 * epoch + step, worker.rank)
        return parameters(model), repr(session.recipe)

    found = cluster(work, 2)
    agree([trained for trained, _ in found])
    assert found[0][1] == found[1][1]
    assert switched


def test_a_resumed_run_decides_as_the_one_that_continued(tmp_path: Path) -> None:
    def run(worker: Worker, *, stops_at: int | None) -> Any:
        model, optimizer, session = begin(worker, slow, Auto(local_steps=False))
        choice = next(act.__self__ for act in session._between_steps)  # type: ignore[attr-defined]
        for step in range(40):
            if step == stops_at:
                session.save(tmp_path / str(worker.world))
                model, optimizer, session = _again(worker, session, tmp_path / str(worker.world))
                choice = next(act.__self__ for act in session._between_steps)  # type: ignore[attr-defined]
            train_step(model, optimizer, step, worker.rank)
        return parameters(model), choice.state_dict(), repr(session.recipe)

    through = cluster(lambda worker: run(worker, stops_at=None), 2)
    resumed = cluster(lambda worker: run(worker, stops_at=13), 2)
    for (one, state, recipe), (other, theirs, also) in zip(through, resumed, strict=True):
        assert torch.equal(one, other)
        assert recipe == also
        assert state == theirs


def test_a_training_that_resumes_with_more_steps_chooses_among_more_rungs(tmp_path: Path) -> None:
    def run(worker: Worker) -> Any:
        folder = tmp_path / str(worker.world)
        model, optimizer, session = begin(worker, slow, Auto(), optimizer=AdamW)
        for step in range(3 + 80):
            if step == 30:
                session.save(folder)
                model, optimizer, session = _again(worker, session, folder, Auto(steps=20_000), AdamW)
            train_step(model, optimizer, step, worker.rank)
        choice = next(act.__self__ for act in session._between_steps)  # type: ignore[attr-defined]
        return parameters(model), choice.state_dict()["rungs"]

    found = cluster(run, 2)
    agree([trained for trained, _ in found])
    assert any("OneBit" in name for name in found[0][1])


def _again(
    worker: Worker, before: Session, folder: Path, auto: Auto = RUNGS_OF_GRADIENTS, optimizer: Any = momentum_sgd
) -> Any:
    for hook in before._hooks:
        hook.remove()
    before._synchronizer.close()
    model, optimizer, session = begin(worker, slow, auto, optimizer=optimizer)
    session.load(folder)
    return model, optimizer, session


def test_a_script_that_switches_by_itself_is_left_alone(switched: list[events.RecipeSwitched]) -> None:
    def work(worker: Worker) -> str:
        model, optimizer, session = begin(worker, slow, Auto())
        session.switch("OneBit()")
        for step in range(40):
            train_step(model, optimizer, step, worker.rank)
        return repr(session.recipe)

    assert all("OneBit" in recipe for recipe in cluster(work, 2))


def test_it_begins_with_local_steps_where_they_may_be() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = SGD(model.parameters(), 0.1)
    assert "DiLoCo" in repr(first_recipe(Auto(), model, optimizer, 2))
    for auto in (Auto(local_steps=False), Auto(most_steps=1.1)):
        assert first_recipe(auto, model, optimizer, 2) == Recipe()


def test_local_steps_at_first_end_at_the_first_look_on_a_fast_line(switched: list[events.RecipeSwitched]) -> None:
    def work(worker: Worker) -> Any:
        model = network(worker.rank)
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
        session = worker.attach(model, optimizer, first_recipe(ANY, model, optimizer, worker.world))
        VirtualClock(fast).put_into(session)
        choose_while_training(session, ANY)
        recipes = []
        for step in range(40):
            train_step(model, optimizer, step, worker.rank)
            recipes.append(repr(session.recipe))
        return recipes, parameters(model)

    found = cluster(work, 2)
    recipes = found[0][0]
    assert "DiLoCo" in recipes[18]
    assert {*recipes[20:]} == {repr(Recipe())}
    agree([trained for _, trained in found])


def test_auto_uses_step_costs_of_the_optimizer() -> None:
    def work(worker: Worker) -> Any:
        model = network(worker.rank)
        optimizer = AdamW(model.parameters())
        session = worker.attach(model, optimizer, Auto())
        choice = RecipeChoice(session, Auto(), Rule())
        return [cost.steps for cost in choice._costs]

    assert cluster(work, 2)[0] == [1.0, 1.0, 1.0, 1.07, 1.18, 2.3, 1.3, 1.25]


def test_a_measurement_is_of_this_rank() -> None:
    def work(worker: Worker) -> Any:
        model, optimizer, session = begin(worker, slow, Auto())
        (look,) = session._between_steps
        optimizer.zero_grad()
        loss_of(model, 0, worker.rank).backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        optimizer.step()
        return look.__self__._measured(), norm

    measured, norm = cluster(work, 2)[1]
    assert measured.gradient_norm == pytest.approx(norm)
    assert measured.learning_rate == 0.05
    assert measured.residual_norm is None
    assert len(measured.steps) == 1
    assert measured.bytes_sent > 0


def test_first_measurement_includes_the_time_of_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[Measurement]] = []

    def spy(rule: Any, costs: Any, state: Any, heard: list[Measurement], step: int) -> Any:
        told.append(heard)
        return decide(rule, costs, state, heard, step)

    monkeypatch.setattr("gossamer.train.session.auto_recipe.decide", spy)
    cluster(lambda worker: train(worker, slow, 8, Auto(local_steps=False)), 2)
    assert all(each.exchange_seconds is not None for each in told[0])


def test_alone_there_is_nothing_to_choose() -> None:
    def work(worker: Worker) -> Any:
        _, _, session = begin(worker, slow, Auto())
        return session._between_steps, PART in session._tracked.state_dict()

    assert cluster(work, 1) == [([], False)]


def test_auto_is_refused_with_a_global_batch_and_in_elastic_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttachError, match="without a global batch"):
        refuse_fixed_choice(Auto(), 64)
    monkeypatch.setattr("gossamer.train.session.auto_recipe.is_elastic", lambda: True)
    with pytest.raises(AttachError, match="an elastic run cannot have the recipe Auto"):
        refuse_fixed_choice(Auto(), None)


SCRIPT = """
import torch, gossamer
world = gossamer.init()
torch.manual_seed(world.rank)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
session = gossamer.attach(model, optimizer, "auto")
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
with session.averaged_parameters(model):
    digest = sum(p.double().sum().item() for p in model.parameters())
texts = gossamer.gather(repr((digest, session.recipe)))
assert len(set(texts)) == 1, texts
print("alike", session.recipe)
"""


@pytest.mark.processes
def test_processes_choose_alike(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for done in run_workers([str(tmp_path / "train.py")], 2):
        assert done.returncode == 0, done.stdout
        assert "alike" in done.stdout
