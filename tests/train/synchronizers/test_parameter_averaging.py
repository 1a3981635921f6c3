"""Parameter averaging: what all workers agree on, when it is shown, reset, saved and ended."""

from __future__ import annotations

import threading
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from support.training_loops import START, Trace, agree, close, heard, owed_and_in_flight, sgd, spread, told
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters, train_step
from torch import Tensor, nn

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import LoopError, RecipeError
from gossamer.train import checkpoint


def test_merged_shows_what_all_agree_on_and_gives_back_every_bit() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model, another = network(worker.rank), network(9)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        session = worker.attach(model, optimizer, "DiLoCo(3, fragments=2, delay=2, mix=0.5)")
        for step in range(7):
            train_step(model, optimizer, step, worker.rank)
        mine, theirs = parameters(model), parameters(another)
        with session.averaged_parameters(model) as shown:
            assert shown is model
            merged = parameters(model)
            with session.averaged_parameters(another):
                assert torch.equal(parameters(another), merged)
        assert torch.equal(parameters(another), theirs)
        assert torch.equal(parameters(model), mine)
        with pytest.raises(KeyError, match="evaluation"), session.averaged_parameters(model):
            raise KeyError("evaluation")
        assert torch.equal(parameters(model), mine)
        return mine, merged

    results = cluster(work, 3)
    assert spread([mine for mine, _ in results]) > 0
    assert not torch.equal(agree([merged for _, merged in results]), START)


@pytest.mark.parametrize(("recipe", "steps", "held"), [
    ("LocalSGD(4)", 6, False), ("LocalSGD(4)", 8, True), ("DiLoCo(4)", 7, False), ("DelayedAveraging(2)", 5, False),
    ("Gossip()", 5, False), ("ParameterServer('sync')", 5, True), ("Dense()", 5, True),
])  # fmt: skip
def test_at_the_end_it_is_told_whether_each_holds_what_was_merged(recipe: str, steps: int, held: bool) -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), recipe)
        for step in range(steps):
            train_step(model, optimizer, step, worker.rank)
        session.close()
        return parameters(model)

    with heard(events.Closed) as closed:
        own = cluster(work, 3)
    assert [event.holds_merged for event in closed] == 3 * [held]
    assert (spread(own) == 0) == held
    assert len({event.digest for event in closed}) == 1


def test_the_digest_at_the_end_is_of_what_all_agree_on() -> None:
    together = threading.Barrier(3)

    def work(worker: Worker) -> str:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "LocalSGD(4)")
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
        with session.averaged_parameters(model):
            merged = dict(model.named_parameters())
            expected = checkpoint.digest([merged[name] for name in sorted(merged)])
        own = checkpoint.digest([dict(model.named_parameters())[name] for name in sorted(merged)])
        assert own != expected
        together.wait(60)
        session.close()
        return expected

    with heard(events.Closed) as closed:
        expected = cluster(work, 3)
    assert {event.digest for event in closed} == set(expected)
    assert len(set(expected)) == 1


def resized(worker: Worker, recipe: str) -> tuple[Trace, dict[str, Tensor], dict[str, Tensor]]:
    """(what there is at the end; what was remembered of another layer just before and after a reset in the middle)."""
    model = network(worker.rank)
    assert isinstance(model, nn.Sequential)
    optimizer = sgd()(model)
    session = worker.attach(model, optimizer, recipe)
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for step in range(14):
        if step == 6:
            before = deepcopy(session.state_dict()["state"].get("0.weight", {}))
            last = model[4]
            last.weight = nn.Parameter(torch.cat([last.weight.detach(), last.weight.detach()[:1]]))
            last.bias = nn.Parameter(torch.cat([last.bias.detach(), last.bias.detach()[:1]]))
            optimizer.param_groups[0]["params"] = list(model.parameters())
            session.reset_compressor_state("4.weight", "4.bias")
            after = deepcopy(session.state_dict()["state"].get("0.weight", {}))
            assert ("owed_gradient" in after) == ("EveryStep(delay" in recipe), "a mean that was on its way is owed"
            after.pop("owed_gradient", None)
        optimizer.zero_grad()
        model(batch(step, worker.rank)[0]).square().mean().backward()
        optimizer.step()
    trace = Trace(model, optimizer, session)
    trace.look()
    trace.notes.append(told(trace) - owed_and_in_flight(trace) if recipe.startswith("Delayed") else None)
    return trace, before, after


@pytest.mark.parametrize(
    "recipe",
    [
        "LocalSGD(4) + TopK(0.3)",
        "DiLoCo(4, fragments=2, delay=1)",
        "DelayedAveraging(2)",
        "DelayedAveraging(3, period=2) + TopK(0.3)",
        "EveryStep(delay=1) + TopK(0.3)",
        "EveryStep(accumulate=2)",
    ],
)
def test_a_reset_in_the_middle_leaves_all_agreeing(recipe: str) -> None:
    """Also about what was resized by each worker from its own parameters, and about what was under way."""
    results = cluster(lambda worker: resized(worker, recipe), 3)
    merged = agree([trace.merged[0] for trace, *_ in results])
    assert torch.isfinite(merged).all()
    for trace, before, after in results:
        assert trace.session.steps == (7 if "accumulate" in recipe else 14)
        assert before.keys() == after.keys()
        for key in before:
            landed = recipe.startswith("Delayed") and key.startswith("merging.")
            assert landed or torch.equal(before[key], after[key]), f"reset forgot {key} of others too"
        if recipe.startswith("Delayed"):
            close(trace.path[0], trace.notes[0])


def test_saving_on_one_rank_while_others_train_is_an_error_on_all(tmp_path: Path) -> None:
    def work(worker: Worker, recipe: str) -> str:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), recipe)
        try:
            for step in range(12):
                train_step(model, optimizer, step, worker.rank)
                if (step, worker.rank) == (5, 1):
                    session.save(tmp_path)
        except LoopError as error:
            return str(error)
        return "trained on"

    for recipe in ("LocalSGD(4)", "DiLoCo(4, fragments=2, delay=2)", "DelayedAveraging(2)", "EveryStep(delay=1)"):
        for said in cluster(lambda worker, r=recipe: work(worker, r), 3):
            assert "call session.save() on every rank, not only where world.is_first: rank 1 called it" in said, recipe
    assert not list(tmp_path.iterdir())


def test_a_site_hears_first_that_one_of_it_saves(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "LocalSGD(4, per_site=2)")
        for step in range(12):
            train_step(model, optimizer, step, worker.rank)
            if (step, worker.rank) == (5, 1):
                session.save(tmp_path)

    with pytest.raises(LoopError, match=r"call session\.save.* rank 1 called it"):
        cluster(work, 4)


@pytest.mark.parametrize("recipe", ["EveryStep()", "LocalSGD(4)", "EveryStep(delay=1)"])
def test_a_wish_to_stop_outlives_a_reset(recipe: str) -> None:
    def work(worker: Worker) -> int:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), recipe)
        for step in range(20):
            if step == 3:
                session.request_stop()
                session.reset_compressor_state("0.weight")
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
            if session.should_stop:
                return step
        return -1

    assert 3 <= min(cluster(work, 2)) == max(cluster(work, 2)) <= 8


def test_a_second_backward_is_refused_where_gradients_arrive_late() -> None:
    def work(worker: Worker) -> None:
        model = network(worker.rank)
        worker.attach(model, sgd()(model), "EveryStep(delay=1)")
        for step in range(2):
            loss_of(model, step, worker.rank).backward()

    with pytest.raises(LoopError, match="no_sync"):
        cluster(work, 2)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compressor",
    ["DGC(density=0.01)", "OneBitAdam(warmup=2)", "AdamUpdate()", "MicroAdam()", "Route(DGC(0.01), rest=Dense())"],
)
@pytest.mark.parametrize(
    "strategy",
    [
        "LocalSGD(4)",
        "PostLocalSGD(4, start=3)",
        "DiLoCo(4, outer_momentum=0.0)",
        "DelayedAveraging(2)",
        "EveryStep(delay=1)",
    ],
)
def test_compressors_that_apply_momentum_need_gradients_at_once(strategy: str, compressor: str) -> None:
    with pytest.raises(RecipeError) as refused:
        resolve(f"{strategy} + {compressor}")
    message = str(refused.value)
    instead = message.partition("Write ")[2].partition(", or EveryStep()")[0]
    resolve(instead)
    resolve(f"EveryStep() + {compressor}")
    resolve(f"EveryStep(accumulate=2) + {compressor}")


def test_nothing_else_is_refused() -> None:
    for strategy in ("LocalSGD(4)", "DiLoCo(4, outer_momentum=0.0)", "DelayedAveraging(2)", "EveryStep(delay=1)"):
        for compressor in ("TopK(0.01)", "PowerSGD(2)", "Int8()", "OneBit()", "Dense(dtype='bfloat16')"):
            resolve(f"{strategy} + {compressor}")
