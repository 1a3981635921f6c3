"""Client script: it trains once for a round, and only where what it learns can be sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.federations import federate, one_pass
from support.secure_federations import secure_recipe
from torch import nn

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated import FedAvg, LocalWork, SecureAggregation
from gossamer.base.peer_ops import Peer, Pull, Pulled, Push, Receipt
from gossamer.errors import AttachError, MalformedError
from gossamer.federated import Round, Update
from gossamer.federated.client.script import ClientRecipe, Train, Trained, participate
from gossamer.federated.client.store import MemoryStore
from gossamer.federated.messages import CLIENT, REPORT, THE_SERVER, Report, SecureTask, Task, decode, encode
from gossamer.federated.model_state import ModelState
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


def test_a_device_without_data_says_so_and_sends_nothing() -> None:
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


def some_have_none(model: nn.Module, told: Round) -> Update:
    """Every other device has an empty loader."""
    if told.client is not None and told.client % 2:
        assert list(told.batches([])) == []
        return Update(samples=0)
    return one_pass(model, told)


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=1.0)", "FedBuff(buffer=2, fraction=1.0)"])
def test_who_has_no_data_is_not_waited_for_nor_called_a_liar(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
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
