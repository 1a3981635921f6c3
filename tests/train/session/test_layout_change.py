"""Added parameters: what a model gains after attach is an error with the line to write, and that line averages it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import once_each
from support.sessions import sgd
from support.virtual_workers import Worker, agree, batch, cluster, heard, joined, network, notices, parameters, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune
from torch.optim import SGD, Adam, Optimizer

from gossamer import events
from gossamer.errors import AttachError, CheckpointError, LoopError, MismatchError
from gossamer.train.session import model_watch
from gossamer.train.session.model_watch import ModelWatch
from gossamer.train.session.session import Session


def widened(model: nn.Module, seed: int) -> list[nn.Parameter]:
    """Give a network one more block, other on each rank, with statistics of its own; returns its parameters."""
    assert isinstance(model, nn.Sequential)
    with seeded(seed):
        block = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    model.append(block)
    return list(block.parameters())


def backward(model: nn.Module, step: int, *ranks: int) -> None:
    inputs, targets = joined(batch(step, rank) for rank in ranks)
    mse_loss(model(inputs), targets).backward()


def steps(model: nn.Module, optimizer: Optimizer, session: Session, numbers: range, rank: int) -> None:
    for step in numbers:
        optimizer.zero_grad()
        for part in range(2 if "accumulate" in str(session.recipe) else 1):
            backward(model, 10 * step + part, rank)
        optimizer.step()


RECIPES = [
    "Dense()",
    "TopK(0.2)",
    "Int8()",
    "PowerSGD(rank=2)",
    "Sharded(Int8())",
    "SharedMask(density=0.2)",
    "DGC(density=0.2)",
    "Warmup(TopK(0.2))",
    "EveryStep(delay=1)",
    "EveryStep(accumulate=2)",
    "LocalSGD(period=3)",
    "LocalSGD(period=3) + TopK(0.2)",
    "PostLocalSGD(period=3, start=2)",
    "DiLoCo(period=4, fragments=2, delay=1)",
    "DelayedAveraging(delay=2)",
    "DelayedAveraging(delay=2) + TopK(0.2)",
    "LocalSGD(period=4, per_site=2)",
    "Gossip() + Ring()",
    "Gossip() + Ring() + TopK(0.3)",
    "Gossip(mixing='push-sum') + Ring()",
]
# The same strategy, or another compressor of its kind, is above
LIKE_OTHERS = ["Int8()", "Warmup(TopK(0.2))", "LocalSGD(period=3)", "DelayedAveraging(delay=2)", "Gossip() + Ring()"]


def with_more(
    worker: Worker, recipe: str, *, check: Callable[[Session], Any] = lambda session: None
) -> tuple[Any, ...]:
    """Train, add a block, train on; what all agree on of names, values and the buffers of the block."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    with session.epoch():
        steps(model, optimizer, session, range(5), worker.rank)
    optimizer.add_param_group({"params": widened(model, 10 + worker.rank)})
    names = session.add_parameters()
    started = model[5][0].weight.detach().clone()  # type: ignore[index]
    check(session)
    with session.epoch():
        steps(model, optimizer, session, range(5, 14), worker.rank)
    with session.averaged_parameters(model):
        merged = parameters(model)
    moved = not torch.equal(started, model[5][0].weight)  # type: ignore[index]
    session.close()
    return names, merged, started, moved


@once_each("recipe", RECIPES, not_by_day=LIKE_OTHERS)
def test_added_parameters_are_averaged_under_every_recipe(recipe: str) -> None:
    results = cluster(lambda worker: with_more(worker, recipe), 4 if "per_site" in recipe else 3)
    for names, *_, moved in results:
        assert names == ("5.0.weight", "5.0.bias", "5.1.weight", "5.1.bias", "5.2.weight", "5.2.bias")
        assert moved
    agree([started for _, _, started, _ in results])
    assert torch.isfinite(agree([merged for _, merged, *_ in results])).all()


def test_added_parameters_in_lock_step_equal_one_process() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": grown(model, worker.rank)})
                session.add_parameters()
            optimizer.zero_grad()
            backward(model, step, worker.rank)
            optimizer.step()
        return parameters(model)

    def grown(model: nn.Module, seed: int) -> list[nn.Parameter]:
        with seeded(seed):
            layer = nn.Linear(3, 3).double()
        assert isinstance(model, nn.Sequential)
        model.append(layer)
        return list(layer.parameters())

    model = network(0)
    optimizer = sgd(model)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": grown(model, 0)})
        optimizer.zero_grad()
        backward(model, step, 0, 1)
        optimizer.step()
    torch.testing.assert_close(agree(cluster(work, 2)), parameters(model))


@pytest.mark.parametrize("recipe", ["TopK(0.2)", "DiLoCo(period=4)", "LocalSGD(period=3) + TopK(0.2)"])
def test_state_of_other_parameters_is_kept(recipe: str) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
        steps(model, optimizer, session, range(5), worker.rank)
        before = {name: dict(kept) for name, kept in session.state_dict()["state"].items()}
        before = {name: {key: each.clone() for key, each in kept.items()} for name, kept in before.items()}
        made = session.steps
        optimizer.add_param_group({"params": widened(model, worker.rank)})
        session.add_parameters()
        after = session.state_dict()["state"]
        assert session.steps == made
        assert any(kept for kept in before.values())
        for name, kept in before.items():
            for key, each in kept.items():
                assert torch.equal(after[name][key], each), (name, key)

    cluster(work, 2)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "DiLoCo(period=4)", "LocalSGD(period=3) + TopK(0.2)"])
def test_parameters_that_pruning_renames_train_on_as_before(recipe: str, added: bool) -> None:
    def work(worker: Worker, prunes: bool) -> tuple[list[Tensor], dict[str, Any]]:
        model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
        with session.epoch():
            steps(model, optimizer, session, range(5), worker.rank)
        if prunes:
            prune.identity(model[2], "weight")  # type: ignore[index, no-untyped-call]  # a mask of ones
            assert not added or session.add_parameters() == ()
        with session.epoch():
            steps(model, optimizer, session, range(5, 14), worker.rank)
        with session.averaged_parameters(model):
            merged = [each.detach().clone() for name, each in sorted(model.named_parameters())]
        state = session.state_dict()["state"]
        session.close()
        assert not state or ("2.weight_orig" in state) == (prunes and added)
        return merged, {name.removesuffix("_orig"): kept for name, kept in state.items()}

    usual = cluster(lambda worker: work(worker, False), 2)
    with notices() as said, heard(events.Closed) as closed:
        found = cluster(lambda worker: work(worker, True), 2)
    assert not [line for line in said if "than at attach" in line]
    assert len({each.digest for each in closed}) == 1
    for (merged, state), (usual_merged, usual_state) in zip(found, usual, strict=True):
        assert all(map(torch.equal, merged, usual_merged))
        assert {*state} == {*usual_state}
        for name, kept in usual_state.items():
            assert all(torch.equal(state[name][key], each) for key, each in kept.items())


def test_a_layer_that_was_pruned_differently_on_each_rank_is_refused() -> None:
    def work(worker: Worker) -> None:
        model, _, session = worker.start(network(0), sgd, "Dense()")
        prune.identity(model[2 * worker.rank], "weight")
        session.add_parameters()

    with pytest.raises(MismatchError, match="different parameters"):
        cluster(work, 2)


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=3)"])
def test_buffers_of_new_modules_are_handed_out_and_kept_alike(recipe: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        steps(model, optimizer, session, range(3), worker.rank)
        optimizer.add_param_group({"params": widened(model, 0)})
        statistics = model[5][1].running_mean  # type: ignore[index, union-attr]
        statistics.fill_(float(worker.rank))
        session.add_parameters()
        begun = statistics.clone()
        with session.epoch():
            steps(model, optimizer, session, range(3, 9), worker.rank)
        return begun, statistics.clone()

    results = cluster(work, 2)
    assert torch.equal(agree([begun for begun, _ in results]), torch.zeros(5, dtype=torch.float64))
    assert agree([ended for _, ended in results]).any()


def test_gradients_on_their_way_are_not_lost_when_parameters_are_added() -> None:
    """With a delay of one step, five passes move the parameters by the mean of five gradients; one step comes later."""

    def work(worker: Worker, adds: bool) -> Tensor:
        model = nn.Linear(2, 1, bias=False).double()
        optimizer = SGD(model.parameters(), 1.0)
        session = worker.attach(model, optimizer, "EveryStep(delay=1)")
        begun = model.weight.detach().clone()
        for step in range(6 + adds):
            if adds and step == 3:
                model.register_parameter("extra", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
                optimizer.add_param_group({"params": [model.extra]})
                session.add_parameters()
            optimizer.zero_grad()
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
            optimizer.step()
        return model.weight.detach() - begun

    assert torch.equal(agree(cluster(lambda worker: work(worker, False), 2)), torch.full((1, 2), -5.0).double())
    assert torch.equal(agree(cluster(lambda worker: work(worker, True), 2)), torch.full((1, 2), -6.0).double())


# -- a model that has more than was attached ---------------------------------------------------------------------------

GAINS: dict[str, Callable[[nn.Sequential], None]] = {
    "a head": lambda model: model.__setitem__(4, nn.Linear(16, 3).double()),
    "an adapter": lambda model: model[0].add_module("adapter", nn.Linear(2, 2).double()),  # type: ignore[arg-type]
    "a replaced parameter": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "a registered parameter": lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1).double())),
}


@pytest.mark.parametrize("kind", GAINS)
@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=4)", "Gossip() + Ring()"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_that_was_not_there_at_attach_is_an_error_in_the_next_step(
    recipe: str, kind: str, world: int
) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        steps(model, optimizer, session, range(2), worker.rank)
        GAINS[kind](model)  # type: ignore[arg-type]
        steps(model, optimizer, session, range(2, 3), worker.rank)

    with pytest.raises(LoopError, match=r"did not have at attach: \".*session\.add_parameters\(\) on every rank"):
        cluster(work, world)


@pytest.mark.parametrize("kind", GAINS)
def test_an_optimizer_of_its_own_does_not_hide_a_new_parameter(kind: str) -> None:
    def work(worker: Worker) -> None:
        model, _, _ = worker.start(network(0), sgd)
        GAINS[kind](model)  # type: ignore[arg-type]
        backward(model, 0, worker.rank)
        Adam(model.parameters()).step()

    with pytest.raises(LoopError, match=r"missing at attach: .*add_parameters|did not have at attach"):
        cluster(work, 2)


def put_in_past_the_hooks(model: nn.Module) -> None:
    model[0]._parameters["weight"] = nn.Parameter(model[0].weight.detach().clone())  # type: ignore[index, union-attr, operator]


def test_an_epoch_begins_with_a_search_of_the_model() -> None:
    model = network(0)
    watch = ModelWatch(model)
    put_in_past_the_hooks(model)
    assert not watch.changed
    assert watch.gained() == ["0.weight"]

    def work(worker: Worker) -> None:
        model, _, session = worker.start(network(0), sgd)
        put_in_past_the_hooks(model)
        with session.epoch():
            raise AssertionError

    with pytest.raises(LoopError, match=r'did not have at attach: "0\.weight"'):
        cluster(work, 2)


def test_a_model_that_gains_nothing_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    whole = ModelWatch.gained
    monkeypatch.setattr(ModelWatch, "gained", lambda self: searched.append(1) or whole(self))

    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd)
        for step in range(3):
            nn.Linear(2, 2)  # another module of this process
            model.note = step  # type: ignore[assignment]
            steps(model, optimizer, session, range(step, step + 1), worker.rank)

    cluster(work, 2)
    assert not searched


def test_a_model_that_gains_a_module_without_parameters_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    whole = ModelWatch.gained
    monkeypatch.setattr(ModelWatch, "gained", lambda self: searched.append(1) or whole(self))

    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd)
        model.append(nn.Identity())  # type: ignore[operator]
        steps(model, optimizer, session, range(3), worker.rank)

    cluster(work, 2)
    assert len(searched) == 2, "once by each rank"


def test_a_new_parameter_at_the_address_of_one_that_is_gone_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_watch, "id", lambda _: 0, raising=False)
    model = nn.Linear(2, 2)
    watch = ModelWatch(model)
    watch.remove()
    assert watch.knows(model.bias)
    assert not watch.knows(nn.Parameter(torch.zeros(2)))


def test_frozen_and_tied_parameters_are_no_news() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd)
        assert isinstance(model, nn.Sequential)
        model.register_parameter("constant", nn.Parameter(torch.ones(1), requires_grad=False))
        model[2].register_module("again", model[0])
        with session.epoch():
            steps(model, optimizer, session, range(2), worker.rank)
        assert session.add_parameters() == ()

    cluster(work, 2)


def test_thawed_parameters_are_added_and_frozen_ones_are_left_out_until_they_are_added_again() -> None:
    def work(worker: Worker, adds: bool) -> tuple[tuple[str, ...], Tensor]:
        model = network(0)
        first, second, *_ = model.parameters()
        first.requires_grad_(False)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "TopK(0.5)")
        steps(model, optimizer, session, range(2), worker.rank)
        first.requires_grad_(True)
        second.requires_grad_(False)
        names = session.add_parameters()
        steps(model, optimizer, session, range(2, 5), worker.rank)
        second.requires_grad_(True)
        names += session.add_parameters() if adds else ()
        steps(model, optimizer, session, range(6, 8), worker.rank)
        return names, parameters(model)

    results = cluster(lambda worker: work(worker, True), 2)
    assert {names for names, _ in results} == {("0.weight", "0.bias")}
    agree([ended for _, ended in results])
    with pytest.raises(LoopError, match=r'frozen or missing at attach: "0\.bias"'):
        cluster(lambda worker: work(worker, False), 2)


def test_a_replaced_head_may_stay_in_the_optimizer() -> None:
    """Its gradients are gone with zero_grad(), so that the optimizer passes it over."""

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.5)")
        assert isinstance(model, nn.Sequential)
        steps(model, optimizer, session, range(2), worker.rank)
        with seeded(worker.rank):
            model[4] = nn.Linear(16, 3).double()
        optimizer.add_param_group({"params": model[4].parameters()})
        assert session.add_parameters() == ("4.weight", "4.bias")
        steps(model, optimizer, session, range(2, 5), worker.rank)
        return parameters(model)

    agree(cluster(work, 2))


def test_a_checkpoint_is_loaded_by_a_model_that_has_the_added_parameters(tmp_path: Path) -> None:
    def save(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.5)")
        steps(model, optimizer, session, range(2), worker.rank)
        optimizer.add_param_group({"params": widened(model, worker.rank)})
        session.add_parameters()
        steps(model, optimizer, session, range(2, 4), worker.rank)
        session.save(tmp_path)
        steps(model, optimizer, session, range(4, 6), worker.rank)
        return parameters(model)

    def resume(worker: Worker, wide: bool) -> Tensor:
        model = network(1)
        optimizer = sgd(model)
        if wide:
            optimizer.add_param_group({"params": widened(model, 5)})
        session = worker.attach(model, optimizer, "TopK(0.5)")
        session.load(tmp_path)
        steps(model, optimizer, session, range(4, 6), worker.rank)
        return parameters(model)

    assert torch.equal(agree(cluster(save, 2)), agree(cluster(lambda worker: resume(worker, True), 2)))
    with pytest.raises(
        CheckpointError, match=r"Before gossamer\.attach.*including parameters of session\.add_parameters\(\)"
    ):
        cluster(lambda worker: resume(worker, False), 2)


# -- parameters of no session ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_trained_parameter_of_no_session_is_one_notice(world: int) -> None:
    """As SAC's log_alpha. A second session's parameters are no news to the first."""

    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd)
        other, its_own, _ = worker.start(nn.Linear(2, 2).double(), sgd)
        alpha = nn.Parameter(torch.zeros(1))
        alone = Adam([alpha])
        for step in range(3):
            steps(model, optimizer, session, range(step, step + 1), worker.rank)
            its_own.zero_grad()
            other(torch.ones(1, 2).double()).sum().backward()
            its_own.step()
            alone.step()
            alpha.grad = torch.ones(1)

    with notices() as said:
        cluster(work, world)
    told = [each for each in said if "belongs to no session" in each]
    assert len(told) == (world > 1)
    assert all("Adam trains 1 parameter of shape (1,)" in each for each in told)
    assert all("gossamer.attach(nn.ParameterList(parameters), optimizer) with this Adam" in each for each in told)


def test_a_list_of_such_parameters_is_averaged_in_a_session_of_its_own() -> None:
    def work(worker: Worker) -> torch.Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        alpha = nn.Parameter(torch.zeros(1))
        alone = Adam([alpha])
        worker.attach(nn.ParameterList([alpha]), alone)
        for step in range(3):
            steps(model, optimizer, session, range(step, step + 1), worker.rank)
            alone.zero_grad()
            (alpha * (worker.rank - 0.3)).sum().backward()
            alone.step()
        return alpha.detach()

    with notices() as said:
        alphas = cluster(work, 2)
    assert agree(alphas).item() < 0, "by the mean gradient, 0.2"
    assert not said


# -- Added parameters that are refused: on every rank, with the line to write, and nothing has changed -----------------


def refused(worker: Worker, act: Callable[[Worker, nn.Module, Optimizer, Session], None], recipe: str) -> str:
    model, optimizer, session = worker.start(network(0), sgd, recipe)
    steps(model, optimizer, session, range(3), worker.rank)
    try:
        act(worker, model, optimizer, session)
        steps(model, optimizer, session, range(3, 9), worker.rank)
    except (LoopError, AttachError, MismatchError) as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("recipe", ["Dense()", "EveryStep(delay=1)", "LocalSGD(period=2)", "Gossip() + Complete()"])
def test_adding_on_one_rank_alone_is_an_error_on_all_that_names_the_call(recipe: str) -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        if worker.rank == 1:
            optimizer.add_param_group({"params": widened(model, 0)})
            session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, recipe), 3):
        assert "session.add_parameters()" in said
        assert "rank 1" in said
        assert "session.save()" not in said


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)", "Gossip() + Complete()"])
def test_error_about_switch_on_one_rank_names_switch(recipe: str) -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        if worker.rank == 1:
            session.switch("Int8()")

    for said in cluster(lambda worker: refused(worker, act, recipe), 3):
        assert "session.switch()" in said
        assert "session.save()" not in said


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)", "Gossip() + Complete()"])
def test_different_calls_on_different_ranks_are_all_named(recipe: str, tmp_path: Path) -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        if worker.rank == 0:
            session.save(tmp_path)
        elif worker.rank == 1:
            session.switch("Int8()")
        else:
            session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, recipe), 3):
        assert all(f"session.{call}()" in said for call in ("save", "switch", "add_parameters"))


def test_adding_different_parameters_is_refused_without_changes() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        before = [id(each) for bucket in session._synchronizer.buckets for each in bucket.parameters.values()]
        layer = nn.Linear(3 + worker.rank, 3).double()
        model.add_module("new", layer)
        optimizer.add_param_group({"params": layer.parameters()})
        try:
            session.add_parameters()
        finally:
            after = [id(each) for bucket in session._synchronizer.buckets for each in bucket.parameters.values()]
            assert before == after

    for said in cluster(lambda worker: refused(worker, act, "Dense()"), 2):
        assert "the ranks add different parameters" in said
        assert "(3, 4)" in said


def test_one_ranks_refusal_reaches_all() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        model.add_module("new", nn.Linear(2, 2, dtype=torch.complex64 if worker.rank else torch.float64))
        session.add_parameters()

    mine, other = cluster(lambda worker: refused(worker, act, "Dense()"), 2)
    assert "the ranks add different parameters" in mine
    assert "complex on rank 1" in mine or "is complex" in mine
    assert '"new.weight" is complex' in other


def test_momentum_that_a_compressor_applies_must_be_the_attached_optimizers() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        model.add_module("new", nn.Linear(16, 64).double())
        session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, "DGC(density=0.2)"), 2):
        assert 'does not hold "new.weight"' in said
        assert 'optimizer.add_param_group({"params": new_parameters}) first' in said


def test_adding_within_a_step_is_refused() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        backward(model, 3, worker.rank)
        session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, "Dense()"), 2):
        assert "right after optimizer.step()" in said


def test_a_frozen_variance_takes_no_new_parameters() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = Adam(model.parameters(), 1e-3)
        session = worker.attach(model, optimizer, "OneBitAdam(warmup=2)")
        steps(model, optimizer, session, range(3), worker.rank)
        model.add_module("new", nn.Linear(16, 64).double())
        optimizer.add_param_group({"params": model.new.parameters()})
        session.add_parameters()

    with pytest.raises(AttachError, match=r"frozen Adam's variance after its warm-up of 2 steps.*CompressedAdam"):
        cluster(work, 2)
