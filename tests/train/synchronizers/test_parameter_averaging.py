"""Parameter averaging: what all workers agree on, when it is shown, reset, saved and ended."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.resumed_training import check_resume, train
from support.training_loops import START, Trace, agree, close, heard, owed_and_in_flight, sgd, spread, told
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters, train_step
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import DelayedAveraging
from gossamer.errors import AttachError, LoopError, NonFiniteError, RecipeError
from gossamer.train import checkpoint
from gossamer.train.session.session import Session


def test_averaged_parameters_are_equal_and_restored_bit_exactly() -> None:
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


def test_optimizer_state_is_averaged_where_a_scheduler_was_made_before_attach() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(worker.rank)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
        loss_of(model, 9, worker.rank).backward()
        worker.attach(model, optimizer, "LocalSGD(2, optimizer_state='average')")
        assert not optimizer.state  # attach has made no step
        optimizer.zero_grad()
        for step in range(2):
            train_step(model, optimizer, step, worker.rank)
        return torch.cat([optimizer.state[each]["exp_avg"].flatten() for each in model.parameters()])

    assert agree(cluster(work, 2)).any()


class CurvatureSGD(torch.optim.SGD):
    """Like AdaHessian, its step needs attributes that the loop gives to parameters."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(1 + parameter.curvature)
        super().step(closure)


def test_optimizer_state_that_cannot_be_found_names_the_line_to_write() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        recipe = "LocalSGD(2, optimizer_state='average')"
        worker.attach(model, CurvatureSGD(model.parameters(), 0.1, momentum=0.9), recipe)

    with pytest.raises(AttachError, match=r"CurvatureSGD.*'curvature'.*Write optimizer_state=\"keep\""):
        cluster(work, 2)


def test_optimizer_state_of_every_group_is_averaged() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(worker.rank)
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, "momentum": 0.9}]
        optimizer = torch.optim.SGD(groups, 0.1)
        worker.attach(model, optimizer, "LocalSGD(2, optimizer_state='average')")
        for step in range(2):
            train_step(model, optimizer, step, worker.rank)
        assert optimizer.state[first].get("momentum_buffer") is None
        return torch.cat([optimizer.state[each]["momentum_buffer"].flatten() for each in others])

    assert agree(cluster(work, 2)).any()


@pytest.mark.parametrize(("recipe", "steps", "held"), [
    ("LocalSGD(4)", 6, False), ("LocalSGD(4)", 8, True), ("DiLoCo(4)", 7, False), ("DelayedAveraging(2)", 5, False),
    ("Gossip()", 5, False), ("ParameterServer('sync')", 5, True), ("Dense()", 5, True),
])  # fmt: skip
def test_closed_reports_whether_ranks_hold_the_merged_model(recipe: str, steps: int, held: bool) -> None:
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


def test_digest_at_the_end_is_of_the_merged_parameters() -> None:
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


def test_save_on_one_rank_of_a_site_is_refused(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "LocalSGD(4, per_site=2)")
        for step in range(12):
            train_step(model, optimizer, step, worker.rank)
            if (step, worker.rank) == (5, 1):
                session.save(tmp_path)

    with pytest.raises(LoopError, match=r"call session\.save.* rank 1 called it"):
        cluster(work, 4)


@pytest.mark.parametrize("recipe", ["EveryStep()", "LocalSGD(4)", "EveryStep(delay=1)"])
def test_request_to_stop_survives_a_reset(recipe: str) -> None:
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


# -- Parameter averaging with non-finite numbers -----------------------------------------------------------------------

# -- gradients ---------------------------------------------------------------------------------------------------------


def poisoned(worker: Worker, recipe: str, steps: int, bad: Callable[[int, int], bool], **options: Any) -> list[Tensor]:
    model = network(worker.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    worker.attach(model, optimizer, recipe, **options)
    path = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1])
        (loss * (math.nan if bad(step, worker.rank) else 1.0)).backward()
        optimizer.step()
        path.append(parameters(model))
    return path


@pytest.mark.parametrize("step", [1, 3])
def test_a_bad_gradient_skips_one_ranks_step_and_no_merge(step: int) -> None:
    """In the middle of a period, and in the step that ends with a merge."""
    with heard(events.Skipped) as skipped:
        paths = cluster(lambda w: poisoned(w, "LocalSGD(4) + TopK(0.3)", 9, lambda s, r: (s, r) == (step, 1)), 3)
    clean = cluster(lambda w: poisoned(w, "LocalSGD(4) + TopK(0.3)", 9, lambda s, r: False), 3)
    assert [event.rank for event in skipped] == [1]
    assert skipped[0].tensor in dict(network().named_parameters())
    if step == 1:
        assert torch.equal(paths[1][1], paths[1][0]), "a step was made with a gradient that is not finite"
    for rank in (0, 2):
        for before in range(3):
            assert torch.equal(paths[rank][before], clean[rank][before]), "others noticed what is local"
    for merge in (3, 7):
        together = agree([path[merge] for path in paths])
        assert torch.isfinite(together).all()
        assert not torch.equal(together, clean[0][merge])
    assert spread([path[8] for path in paths]) > 0


@pytest.mark.parametrize("recipe", ["LocalSGD(8)", "LocalSGD(1)", "DelayedAveraging(2)"])
def test_five_bad_gradients_in_a_row_end_the_run(recipe: str) -> None:
    with pytest.raises(NonFiniteError, match=r'5 steps in a row.*"\d\.(weight|bias)" on rank 1'):
        cluster(lambda worker: poisoned(worker, recipe, 12, lambda s, r: s > 1 and r == 1), 2)


def test_bad_gradients_now_and_then_do_not_end_it() -> None:
    for path in cluster(lambda worker: poisoned(worker, "LocalSGD(20)", 15, lambda s, r: s % 2 == 0 and r == 1), 2):
        assert torch.isfinite(path[-1]).all()


@pytest.mark.parametrize("step", [1, 3])
def test_an_overflow_on_one_rank_is_local(step: int) -> None:
    """A GradScaler lowers that rank's scale and skips its step; sync rounds stay where they are; no rank hears it."""

    def work(worker: Worker, overflows: bool) -> tuple[list[Tensor], float, int]:
        model = network(worker.rank, torch.float32)
        optimizer = sgd(momentum=0.9)(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        session = worker.attach(model, optimizer, "LocalSGD(4)", scaler=scaler)
        path = []
        for t in range(9):
            optimizer.zero_grad()
            inputs, targets = batch(t, worker.rank, dtype=torch.float32)
            bad = overflows and (t, worker.rank) == (step, 1)
            scaler.scale(mse_loss(model(inputs), targets) * (math.inf if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            path.append(parameters(model))
        return path, scaler.get_scale(), session.steps

    results = cluster(lambda worker: work(worker, True), 3)
    clean = cluster(lambda worker: work(worker, False), 3)
    assert [scale for _, scale, _ in results] == [256.0, 128.0, 256.0]
    assert {steps for *_, steps in (*results, *clean)} == {9}
    for rank in (0, 2):
        for before in range(3):
            assert torch.equal(results[rank][0][before], clean[rank][0][before])
    assert torch.equal(results[0][0][3], results[2][0][3])
    together = agree([path[7] for path, *_ in results])
    assert torch.isfinite(together).all()


# -- parameters --------------------------------------------------------------------------------------------------------


def remembered(session: Session) -> Tensor:
    parts = [tensor.flatten() for kept in session.state_dict()["state"].values() for tensor in kept.values()]
    return torch.cat(parts).clone()


def spoilt(worker: Worker, recipe: str, number: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(memory before and after a step, merged parameters). A parameter of rank 1 is `number` during step 5 only."""
    model, optimizer, session = worker.start(network(worker.rank), sgd(), recipe)
    session.set_batch_weight([1, 2, 5][worker.rank])
    first = next(model.parameters()).detach()
    seen = []
    for step in range(9):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        kept, before = first.clone(), remembered(session)
        if (step, worker.rank) == (5, 1):
            first[0, 0] = number
        optimizer.step()
        if (step, worker.rank) == (5, 1):
            assert not abs(float(first[0, 0])) < 1e5, "a merge took place"
            first.copy_(kept)
        with session.averaged_parameters(model):
            seen.append((before, remembered(session), parameters(model)))
    return seen


def check_spoilt(recipe: str, number: float, first_nonfinite: int | None, tolerance: float = 0.0) -> None:
    """Nobody remembers anything of it, who is to blame is named, and the next merge makes up for it."""
    with heard(events.Skipped) as skipped:
        results = cluster(lambda worker: spoilt(worker, recipe, number), 3)
    assert {(event.rank, event.tensor) for event in skipped} == {(first_nonfinite, "0.weight")}
    for seen in results:
        before, after, merged = seen[5]
        assert (before - after).abs().max() <= tolerance, "a merge that was skipped is remembered"
        assert torch.equal(merged, seen[4][2])
        assert not torch.equal(seen[8][2], merged), "nothing was merged any more"
    for step in range(9):
        assert torch.isfinite(agree([seen[step][2] for seen in results])).all()


@pytest.mark.parametrize("recipe", ["LocalSGD(3) + TopK(0.2)", "DiLoCo(3) + Int8()"])
def test_parameters_gone_bad_are_not_merged(recipe: str) -> None:
    check_spoilt(recipe, math.nan, 1)


@pytest.mark.parametrize("recipe", ["LocalSGD(3)", "DelayedAveraging(0, period=3)"])
def test_differences_beyond_half_precision_are_not_merged(recipe: str) -> None:
    """What was offered is offered again: to rounding where it had been taken out of what is remembered."""
    check_spoilt(recipe + " + Dense(dtype='float16')", 1e6, None, 1e-8 if recipe.startswith("Delayed") else 0.0)


def test_mutant_without_undo_of_differences_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DelayedAveraging, "undo", lambda self, memory, offered: None)
    with pytest.raises(AssertionError, match="is remembered"):
        test_differences_beyond_half_precision_are_not_merged("DelayedAveraging(0, period=3)")


# -- Parameter averaging resumed: to the bit, and with other numbers of workers ----------------------------------------

RESUMES = [
    ("LocalSGD(4) + TopK(0.2)", [2, 5]),
    ("LocalSGD(3, optimizer_state='average') + Int8()", [4]),
    ("PostLocalSGD(4, start=5) + TopK(0.2)", [3, 5, 7]),
    ("DiLoCo(6, fragments=3, delay=3, mix=0.5) + Int8()", [2, 3, 7]),
    ("DiLoCo(4, outer_momentum=0.5, delay=2, optimizer_state='average') + PowerSGD(2)", [5]),
    ("DelayedAveraging(3) + TopK(0.1)", [2, 6]),
    ("DelayedAveraging(3, period=2) + Int8()", [5]),
    ("EveryStep(accumulate=3) + TopK(0.2)", [1, 5]),
    ("EveryStep(delay=2) + Int8()", [1, 4]),
]


@pytest.mark.parametrize(("recipe", "after"), [*RESUMES[::2], *nightly(*RESUMES[1::2])], ids=str)
def test_resumed_training_goes_the_same_way(recipe: str, after: Sequence[int]) -> None:
    check_resume(recipe, after)


def test_resumed_sites_go_the_same_way() -> None:
    check_resume("LocalSGD(4, per_site=2) + Int8()", [2, 5], world=4)


def no_flights(session: Any) -> None:
    session["progress"]["flights"] = []


def no_sums(session: Any) -> None:
    session["progress"]["accumulated"] = {"made": 0, "weight": 0.0, "used": []}


def no_weights(session: Any) -> None:
    session["progress"]["weights"] = [1.0 for _ in session["progress"]["weights"]]


def nothing_agreed(session: Any) -> None:
    for kept in session["state"].values():
        kept["merging.agreed"].zero_()


def nothing_owed(session: Any) -> None:
    for kept in session["state"].values():
        for key in kept:
            if key.endswith("residual"):
                kept[key].zero_()


@pytest.mark.parametrize(
    ("recipe", "after", "spoil"),
    [
        ("DiLoCo(6, fragments=3, delay=3, mix=0.5)", [3], no_flights),
        ("DelayedAveraging(3)", [6], no_flights),
        ("EveryStep(delay=2)", [4], no_flights),
        ("EveryStep(accumulate=3)", [5], no_sums),
        ("LocalSGD(4)", [6], no_weights),
        ("LocalSGD(4)", [6], nothing_agreed),
        ("LocalSGD(4) + TopK(0.2)", [6], nothing_owed),
    ],
)
def test_mutants_of_resume_are_detected(recipe: str, after: Sequence[int], spoil: Any) -> None:
    with pytest.raises(AssertionError, match="another way"):
        check_resume(recipe, after, spoil)


@pytest.mark.parametrize(
    ("recipe", "made"),
    [
        ("DiLoCo(6, fragments=3, delay=3, mix=0.5) + Int8()", 3),
        ("DelayedAveraging(3) + TopK(0.1)", 5),
        ("EveryStep(accumulate=3) + TopK(0.2)", 4),
        ("EveryStep(delay=2) + TopK(0.2)", 4),
        ("PostLocalSGD(4, start=5) + TopK(0.2)", 7),
        ("DiLoCo(6, delay=3, optimizer_state='average')", 7),
    ],
)
def test_saved_and_loaded_training_goes_the_same_way(recipe: str, made: int, tmp_path: Path) -> None:
    whole = cluster(lambda worker: train(worker, recipe, 0, 10), 3)
    cluster(lambda worker: train(worker, recipe, 0, made, save=tmp_path), 3)
    resumed = cluster(lambda worker: train(worker, recipe, made, 10, load=tmp_path), 3)
    for (path, merged, _), (path_after, merged_after, _) in zip(whole, resumed, strict=True):
        for a, b in zip((*path[made:], *merged[made:]), (*path_after, *merged_after), strict=True):
            assert torch.equal(a, b)


# -- other numbers of workers ------------------------------------------------------------------------------------------


MERGING = [
    "LocalSGD(4) + TopK(0.2)",
    "DiLoCo(6, fragments=3, delay=3, mix=0.5) + Int8()",
    "DelayedAveraging(3)",
    "PostLocalSGD(4, start=2)",
]


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("recipe", MERGING)
def test_another_number_of_workers_resumes_from_the_merged_parameters(
    recipe: str, old: int, new: int, tmp_path: Path
) -> None:
    def advance(worker: Worker) -> tuple[Tensor, Tensor, Tensor, int]:
        model = network(worker.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = worker.attach(model, optimizer, recipe)
        session.load(tmp_path)
        begun = parameters(model)
        with session.averaged_parameters(model):
            merged = parameters(model)
        for step in range(7, 15):
            train_step(model, optimizer, step, worker.rank)
        with session.averaged_parameters(model):
            return begun, merged, parameters(model), session.steps

    before = cluster(lambda worker: train(worker, recipe, 0, 7, save=tmp_path), old)
    agreed = agree([merged[-1] for _, merged, _ in before])
    later = cluster(advance, new)
    for begun, merged, ended, steps in later:
        assert torch.equal(begun, agreed)
        assert torch.equal(merged, agreed)
        assert steps == 15
        assert not torch.equal(ended, agreed), "nothing was merged any more"
        assert torch.isfinite(ended).all()
    agree([ended for _, _, ended, _ in later])
