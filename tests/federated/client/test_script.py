"""Client script: tasks, restarts, feedback, and versions of another lineage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from support.federated_faults import WholeNumbers, WholeSteps, check_conserved, sparse
from support.federations import federate, one_pass
from support.secure_federations import secure_recipe
from torch import Tensor, nn

from gossamer.algorithms.compressors import Compressor, Int8, TopK
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import FedAvg, LocalPrivacy, LocalWork, SecureAggregation
from gossamer.base.peer_ops import Arrived, Peer, Pull, Pulled, Push, Receipt
from gossamer.errors import AttachError, MalformedError, MismatchError
from gossamer.federated import Round, Update
from gossamer.federated.client.script import ClientRecipe, Train, Trained, participate
from gossamer.federated.client.store import ClientState, MemoryStore
from gossamer.federated.messages import CLIENT, REPORT, THE_SERVER, Report, SecureTask, Task, decode, encode
from gossamer.federated.model_state import ModelState
from gossamer.federated.server import journal
from gossamer.federated.server.rounds import Rounds
from gossamer.train.parameter_server.delta_chain import ABOUT_SNAPSHOT


def plain_recipe() -> ClientRecipe:
    resolved = resolve("FedAvg()")
    state = ModelState.of(nn.Linear(2, 1))
    return ClientRecipe(strategy=FedAvg(), compressor=resolved.compressor, pull=None, state=state)


def task(recipe: ClientRecipe, index: int, members: Sequence[int] = ()) -> Pulled:
    secure = SecureTask(members=tuple(members), ranges=(1.0, 16.0)) if members else None
    flat = torch.zeros(recipe.state.layout.numel, dtype=recipe.state.dtype)
    about = encode(Task(round=index, version=0, chain=ABOUT_SNAPSHOT, secure=secure))
    return Pulled(version=0, payload=(flat,), about=about)


@pytest.mark.parametrize("masked", [False, True])
def test_a_round_that_is_given_twice_is_not_trained_again(masked: bool) -> None:
    """What two contributions under one stamp differ by tells what masks and noise are to hide."""
    recipe = secure_recipe(SecureAggregation()) if masked else plain_recipe()
    members = (0, 1, 2) if masked else ()
    store = MemoryStore()
    store.load().round = 4
    for index, refused in ((4, True), (3, True), (5, False)):
        script = participate(0, recipe, store)
        assert isinstance(next(script), Pull)
        if refused:
            with pytest.raises(MalformedError, match=f"gave client 0 round {index} twice"):
                script.send(task(recipe, index, members))
        else:
            assert isinstance(script.send(task(recipe, index, members)), Train)
        script.close()


def test_a_recipe_with_masks_finds_no_identity_before_anything_is_trained() -> None:
    recipe = secure_recipe(SecureAggregation())
    nobody = ClientRecipe(**{**vars(recipe), "roster": None})
    with pytest.raises(AttachError, match="Join with --roster FILE --identity FILE"):
        next(participate(0, nobody, MemoryStore()))


def test_a_device_without_data_reports_it_and_sends_nothing() -> None:
    recipe, store = plain_recipe(), MemoryStore()
    script = participate(0, recipe, store)
    next(script)
    op = script.send(task(recipe, 0))
    assert isinstance(op, Train)
    push = script.send(Trained(flat=op.anchor, work=LocalWork(samples=0, steps=0), metrics={}))
    assert isinstance(push, Push)
    assert (push.key, push.payload) == (REPORT, ())
    report = decode(push.about, Report, Peer(CLIENT, 0))
    assert (report.samples, report.failed) == (0, "")
    again = script.send(Receipt(version=-1, about="{}"))
    assert isinstance(again, Pull)
    assert again.at_least == 1
    assert store.load().residuals == ()


@pytest.mark.parametrize(("version", "kept"), [(7, True), (8, False)])
def test_feedback_older_than_stale_after_is_dropped(version: int, kept: bool) -> None:
    recipe, store = replace(plain_recipe(), strategy=FedAvg(stale_after=4)), MemoryStore()
    store.save(ClientState(residuals=({"residual": torch.ones(3)},), residual_version=3))
    script = participate(0, recipe, store)
    next(script)
    assert isinstance(script.send(replace(task(recipe, 0), version=version)), Train)
    assert bool(store.load().residuals) is kept


def some_have_none(model: nn.Module, told: Round) -> Update:
    """Every other device has an empty loader."""
    if told.client is not None and told.client % 2:
        assert list(told.batches([])) == []
        return Update(samples=0)
    return one_pass(model, told)


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=1.0)", "FedBuff(buffer=2, fraction=1.0)"])
def test_a_device_that_has_no_data_is_not_waited_for_nor_called_a_liar(
    recipe: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = federate(recipe, clients=4, rounds=3, function=some_have_none)
    assert [set(each.reports) for each in run.commits] == [{0, 2}] * 3
    assert all(each.refused == {} for each in run.commits)
    assert run.trace.sent_bytes.get((Peer(CLIENT, 1), THE_SERVER), 0) == 0
    assert not caplog.records


def test_a_cohort_without_data_is_given_up_and_the_next_one_counts() -> None:
    run = federate("FedAvg(fraction=0.25)", clients=4, rounds=4, function=some_have_none)
    assert {client for each in run.commits for client in each.reports} <= {0, 2}
    assert run.rounds.next_round > 4  # some were drawn in vain


def test_under_local_noise_nobody_tells_that_it_has_no_data() -> None:
    recipe = "FedAvg(fraction=1.0, privacy=LocalPrivacy(4.0, delta=0.01))"
    run = federate(recipe, clients=4, rounds=2, function=some_have_none)
    assert [sorted(each.reports) for each in run.commits] == [[0, 1, 2, 3]] * 2


VERSIONS = 8


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@dataclass
class Visits:
    """Devices that come one at a time, make versions alone, and leave."""

    done: WholeNumbers
    trained: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # from what, and what the server had published
    tokens: int = 0

    def start(self) -> None:
        """A new process of the server."""
        self.done.start().begin(0.0)

    def visit(self, client: int, versions: float = inf, killed_at: str = "") -> None:
        """Make so many versions, or up to the end. killed_at: the push after whose arrival the device is killed."""
        done = self.done
        recipe = ClientRecipe(
            strategy=done.strategy, compressor=done.compressor, pull=done.strategy.pull, state=done.state
        )
        script = participate(client, recipe, done.stores[client])
        op: Any = next(script)
        while versions > 0:
            try:
                if isinstance(op, Train):
                    self.trained.append((op.anchor.clone(), self.rounds.model.public.snapshot()[0]))
                    op = script.send(done.train(op))
                    continue
                answer = self._answer(client, op)
                if isinstance(op, Push) and op.key == killed_at:
                    break
                versions -= isinstance(answer, Receipt) and answer.version >= 0
                op = script.send(answer)
            except StopIteration:
                return
        script.close()

    @property
    def rounds(self) -> Rounds:
        assert self.done.held is not None
        return self.done.held

    def _answer(self, client: int, op: Any) -> Any:
        self.tokens += 1
        event = Arrived(moment=0.0, token=self.tokens, sender=Peer(CLIENT, client), op=op)
        return {reply.token: reply.answer for reply in self.rounds.react(event)}[self.tokens]


def federation(directory: Path, pull: Compressor) -> Visits:
    """Anyone alone makes a version."""
    strategy = WholeSteps(fraction=0.25, pull=pull)
    return Visits(
        WholeNumbers(strategy, sparse(), rounds=VERSIONS, keep=lambda rounds: journal.keep(directory, rounds))
    )


def begun_anew(visits: Visits, directory: Path) -> None:
    """Eight versions of one past, six of another, and then devices of the first return."""
    visits.start()
    visits.visit(0, 5)
    visits.visit(1, 1)  # it leaves with version 5
    visits.visit(0, 2)  # and this one with version 7
    assert visits.rounds.model.version == VERSIONS
    shutil.rmtree(directory / "rounds")
    visits.start()
    visits.visit(2, 6)
    visits.trained.clear()
    visits.visit(1, 1)
    visits.visit(0, 1)
    assert visits.rounds.model.version == VERSIONS


def nameless(rounds: Rounds) -> None:
    """The broken twin: no past has a name."""
    rounds.model.lineage = ""


@pytest.mark.parametrize("pull", [Int8(), TopK(density=0.2)], ids=repr)
def test_devices_of_another_past_train_from_what_the_server_published(pull: Compressor, tmp_path: Path) -> None:
    """The versions that they hold have numbers that this past has as well, with other content."""
    visits = federation(tmp_path, pull)
    begun_anew(visits, tmp_path)
    assert len(visits.trained) == 2
    for anchor, published in visits.trained:
        assert torch.equal(anchor, published)
    twin = federation(tmp_path / "twin", pull)
    twin.done.change = nameless
    begun_anew(twin, tmp_path / "twin")
    assert not any(torch.equal(anchor, published) for anchor, published in twin.trained)


def test_what_is_owed_to_a_past_that_is_gone_is_not_paid_to_another(tmp_path: Path) -> None:
    visits = federation(tmp_path, TopK(density=0.2))
    begun_anew(visits, tmp_path)
    check_conserved(visits.done)
    twin = federation(tmp_path / "twin", TopK(density=0.2))
    twin.done.change = nameless
    begun_anew(twin, tmp_path / "twin")
    with pytest.raises(AssertionError, match="gave something that is nowhere"):
        check_conserved(twin.done)


def test_what_was_on_its_way_to_a_past_that_is_gone_counts_in_none(tmp_path: Path) -> None:
    """Its device is killed before it hears of its fate, and then the server forgets."""
    visits = federation(tmp_path, TopK(density=0.2))
    visits.start()
    visits.visit(0, 2)
    visits.visit(1, killed_at=REPORT)
    assert visits.done.stores[1].load().pending is not None
    shutil.rmtree(tmp_path / "rounds")
    visits.start()
    visits.visit(2, 2)
    visits.visit(1, 3)
    assert visits.done.stores[1].load().pending is None
    visits.visit(0)
    check_conserved(visits.done)


def test_what_was_told_to_a_past_that_is_gone_stays_told(tmp_path: Path) -> None:
    """A server that forgets does not give a device its privacy back."""
    strategy = WholeSteps(fraction=0.25, privacy=LocalPrivacy(1.0, delta=0.01))
    visits = Visits(WholeNumbers(strategy, rounds=VERSIONS, keep=lambda rounds: journal.keep(tmp_path, rounds)))
    visits.start()
    visits.visit(0, 3)
    shutil.rmtree(tmp_path / "rounds")
    visits.start()
    visits.visit(0, 2)
    assert visits.rounds.model.version == 2
    assert visits.done.stores[0].load().told == 5


def test_a_device_that_knows_later_rounds_of_another_past_takes_part(tmp_path: Path) -> None:
    """And one that claims to know later rounds of this past is refused, and moves nothing."""
    visits = federation(tmp_path, TopK(density=0.2))
    visits.start()
    visits.visit(0, 7)
    shutil.rmtree(tmp_path / "rounds")
    visits.start()
    visits.visit(0, 1)
    assert visits.rounds.next_round == 1
    visits.done.stores[0].load().round = 1000
    with pytest.raises(MismatchError, match="remembers round 1000 of another federation"):
        visits.visit(0, 1)
    assert visits.rounds.next_round == 1
    visits.visit(1)
    check_conserved(visits.done)
