"""Local SGD: equal to synchronous training where it should be, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.training_loops import (
    CENTRES,
    LR,
    START,
    Trace,
    agree,
    close,
    gradient,
    mean_of,
    quadratic,
    run,
    sgd,
    spread,
)
from support.virtual_workers import Worker, batch, cluster, parameters, seeded
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging import averagers

from gossamer.algorithms.strategies import (
    AVERAGE,
    KEEP,
    RESET,
    AveragingStrategy,
    DiLoCo,
    LocalSGD,
    Memory,
    PostLocalSGD,
    Strategy,
)
from gossamer.errors import AttachError
from gossamer.train.engine.bucket import assign_buckets

STATES = [KEEP, AVERAGE, RESET]

# -- with a period of one ---------------------------------------------------------------------------------------------


def check_synchronous(strategy: Strategy, **options: Any) -> None:
    ours = run(strategy, 8, **options)
    theirs = run("EveryStep()", 8, **options)[0]
    for one, other in zip(zip(*(trace.path for trace in ours), strict=True), theirs.path, strict=True):
        close(agree(one), other)


LINEAR = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}]


@pytest.mark.parametrize("options", LINEAR, ids=str)
def test_a_period_of_one_is_synchronous_for_linear_optimizers(options: dict[str, Any]) -> None:
    check_synchronous(LocalSGD(1), rule=sgd(**options))


def test_a_period_of_one_is_not_synchronous_for_adam() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_synchronous(LocalSGD(1), rule=lambda model: torch.optim.Adam(model.parameters(), lr=0.01))


@dataclass(frozen=True, repr=False)
class Forgetful(LocalSGD):
    """Takes over the mean, and goes on measuring from where it began."""

    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        parameters.copy_(memory["agreed"] - mean).add_(mean, alpha=0.5)


def test_the_check_catches_a_landing_that_goes_half_way() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_synchronous(Forgetful(1))


# -- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 3, 4])
def test_on_a_quadratic_by_hand(period: int) -> None:
    """Within a round x goes to c_i by the factor 1 - lr in every step; at its end all have the mean."""
    steps, middle = 10, sum(CENTRES) / 3
    for centre, path in zip(CENTRES, cluster(lambda w: quadratic(w, LocalSGD(period), steps), 3), strict=True):
        for made, x in enumerate(path, 1):
            rounds, since = divmod(made, period)
            began = middle + (1 - LR) ** (rounds * period) * (2.0 - middle)
            assert x == pytest.approx(centre + (1 - LR) ** since * (began - centre), abs=1e-12), made


# -- momenta ----------------------------------------------------------------------------------------------------------


def with_momentum(period: int, what: str, steps: int, world: int = 3) -> list[list[Tensor]]:
    """Local SGD with heavy-ball momentum, in a few lines; the parameters of each worker after each step."""
    xs, ms = [START.clone() for _ in range(world)], [torch.zeros_like(START) for _ in range(world)]
    paths: list[list[Tensor]] = [[] for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            ms[rank] = 0.9 * ms[rank] + gradient(xs[rank], step, rank)
            xs[rank] = xs[rank] - LR * ms[rank]
        if (step + 1) % period == 0:
            xs = [mean_of(xs)] * world
            ms = {KEEP: ms, AVERAGE: [mean_of(ms)] * world, RESET: [torch.zeros_like(START)] * world}[what]
        for rank in range(world):
            paths[rank].append(xs[rank])
    return paths


def momenta(trace: Trace) -> Tensor | None:
    held = [trace.optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in trace.model.parameters()]
    return None if any(each is None for each in held) else torch.cat([each.flatten() for each in held]).clone()


def check_momenta(what: str, expected: str) -> None:
    traces = run(LocalSGD(4, optimizer_state=what), 10, rule=sgd(momentum=0.9), note=momenta)
    for trace, path in zip(traces, with_momentum(4, expected, 10), strict=True):
        for one, other in zip(trace.path, path, strict=True):
            close(one, other)
    for step in (3, 7):
        held = [trace.notes[step] for trace in traces]
        if expected == RESET:
            assert held == [None, None, None], "something is left of momenta that were reset"
            continue
        assert (spread(held) == 0.0) == (expected == AVERAGE)
    assert spread([trace.notes[4] for trace in traces]) > 0.0, "each worker has gradients of its own"


@pytest.mark.parametrize("what", STATES)
def test_momenta_are_kept_averaged_or_reset(what: str) -> None:
    check_momenta(what, what)
    for other in STATES:
        if other != what:
            with pytest.raises(AssertionError):
                check_momenta(what, other)


def test_adams_moments_are_averaged_and_its_step_counts_are_not() -> None:
    def note(trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
        states = [trace.optimizer.state[parameter] for parameter in trace.model.parameters()]
        first, second = (torch.cat([s[key].flatten() for s in states]).clone() for key in ("exp_avg", "exp_avg_sq"))
        return first, second, torch.stack([state["step"] for state in states]).clone()

    traces = run(
        LocalSGD(3, optimizer_state=AVERAGE),
        6,
        rule=lambda model: torch.optim.AdamW(model.parameters(), 0.01),
        note=note,
    )
    for step, made in ((2, 3), (5, 6)):
        for kind in (0, 1):
            agree([trace.notes[step][kind] for trace in traces])
        assert all(torch.equal(trace.notes[step][2], torch.full((6,), float(made))) for trace in traces)
    assert spread([trace.notes[1][0] for trace in traces]) > 0


# -- BatchNorm --------------------------------------------------------------------------------------------------------


def normed(worker: Worker, recipe: Any, steps: int) -> list[tuple[Tensor, Tensor, int]]:
    """(statistics of the model, what they would be had nobody averaged since the step before, batches counted)."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    norm, lonely = model[1], nn.BatchNorm1d(5).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    worker.attach(model, optimizer, recipe)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        lonely.load_state_dict(norm.state_dict())
        inputs, targets = batch(step, worker.rank)
        lonely(model[0](inputs))
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        mine, alone = (torch.cat([each.running_mean, each.running_var]).clone() for each in (norm, lonely))
        seen.append((mine, alone, int(norm.num_batches_tracked)))
    return seen


@pytest.mark.parametrize(
    "recipe", ["LocalSGD(3)", "PostLocalSGD(3, start=2)", "DiLoCo(3)", "DelayedAveraging(delay=0, period=3)"]
)
def test_statistics_of_batches_are_averaged_with_the_parameters(recipe: str) -> None:
    began = 2 if recipe.startswith("Post") else 0
    seen = cluster(lambda worker: normed(worker, recipe, 8), 3)
    for step in range(began, 8):
        mine, alone, counted = zip(*(each[step] for each in seen), strict=True)
        assert counted == (step + 1,) * 3
        if (step + 1 - began) % 3 == 0:
            close(agree(mine), torch.stack(alone).mean(0))
            assert spread(alone) > 0
        else:
            assert all(torch.equal(one, other) for one, other in zip(mine, alone, strict=True))


def test_statistics_that_mix_keep_a_share_of_their_own() -> None:
    seen = cluster(lambda worker: normed(worker, "DiLoCo(3, mix=0.25)", 3), 3)
    mine, alone, _ = zip(*(each[2] for each in seen), strict=True)
    for one, other in zip(mine, alone, strict=True):
        close(one, 0.25 * other + 0.75 * torch.stack(alone).mean(0))


# -- sites ------------------------------------------------------------------------------------------------------------


def sites(period: int, steps: int) -> list[list[Tensor]]:
    """Four workers at two sites: gradients are averaged within each, parameters among all once per period."""
    xs = [START.clone()] * 2
    paths: list[list[Tensor]] = []
    for step in range(steps):
        xs = [x - LR * mean_of([gradient(x, step, 2 * s + each) for each in (0, 1)]) for s, x in enumerate(xs)]
        if (step + 1) % period == 0:
            xs = [mean_of(xs)] * 2
        paths.append([xs[0], xs[0], xs[1], xs[1]])
    return [list(path) for path in zip(*paths, strict=True)]


def check_sites(strategy: Strategy) -> None:
    traces = run(strategy, 9, world=4)
    for trace, path in zip(traces, sites(4, 9), strict=True):
        for one, other in zip(trace.path, path, strict=True):
            close(one, other)
    for step in range(9):
        here, there = (agree([traces[rank].path[step] for rank in ranks]) for ranks in ((0, 1), (2, 3)))
        assert torch.equal(here, there) == (step in (3, 7)), step


def test_sites_average_gradients_inside_and_parameters_between() -> None:
    check_sites(LocalSGD(4, per_site=2))
    with pytest.raises(AssertionError):
        check_sites(LocalSGD(4))


def test_one_site_for_all_is_synchronous() -> None:
    check_synchronous(LocalSGD(3, per_site=3))


def test_sites_that_do_not_divide_the_workers_are_refused() -> None:
    with pytest.raises(AttachError, match=r"3 workers cannot be divided into sites of 2.*multiple of 2"):
        run(LocalSGD(4, per_site=2), 1, world=3)


# -- after a synchronous beginning ------------------------------------------------------------------------------------


def check_alike_until(traces: Sequence[Trace], start: int, period: int) -> None:
    """The same bits until `start` and at every merge after it, and nowhere else."""
    for step, together in enumerate(zip(*(trace.path for trace in traces), strict=True), 1):
        merged = step <= start or (step - start) % period == 0
        assert (spread(together) == 0.0) == merged, f"after step {step} of workers that part at {start}"


@pytest.mark.parametrize("recipe", ["", " + TopK(0.2)", " + Int8()"])
def test_post_local_sgd_parts_at_its_start(recipe: str) -> None:
    traces = run(f"PostLocalSGD(4, start=5){recipe}", 15)
    check_alike_until(traces, 5, 4)
    for made, alone in zip(traces, run("EveryStep()" + recipe, 5), strict=True):
        for one, other in zip(made.path, alone.path, strict=False):
            assert torch.equal(one, other), "the beginning is not synchronous training"
    with pytest.raises(AssertionError, match="after step 1 "):
        check_alike_until(run("LocalSGD(4)" + recipe, 6), 5, 4)


def test_post_local_sgd_continues_as_local_sgd() -> None:
    """From the parameters and the momenta at the start on."""
    traces = run(PostLocalSGD(3, start=4), 10)
    xs = [traces[0].path[3]] * 3
    for step in range(4, 10):
        xs = [x - LR * gradient(x, step, rank) for rank, x in enumerate(xs)]
        xs = [mean_of(xs)] * 3 if (step - 3) % 3 == 0 else xs
        for trace, x in zip(traces, xs, strict=True):
            close(trace.path[step], x)


def test_between_merges_the_merged_model_is_the_last_merge() -> None:
    for trace in run("LocalSGD(4)", 10):
        assert all(torch.equal(merged, START) for merged in trace.merged[:3])
        assert all(torch.equal(merged, trace.path[3]) for merged in trace.merged[3:7])
        assert all(torch.equal(merged, trace.path[7]) for merged in trace.merged[7:])


def test_a_world_of_one_is_plain_training() -> None:
    plain = run(None, 6, world=1)[0]
    for recipe in ("LocalSGD(2)", "PostLocalSGD(2, start=3)", "DiLoCo(2)", "DelayedAveraging(2)", "EveryStep(delay=1)"):
        trace = run(recipe, 6, world=1)[0]
        assert torch.equal(trace.path[-1], plain.path[-1])
        assert torch.equal(trace.merged[-1], plain.path[-1])
        assert trace.session.steps == 6


@pytest.mark.parametrize("recipe", ["LocalSGD(3)", "DiLoCo(3, fragments=2, delay=1)", "DelayedAveraging(2)"])
def test_several_buckets_are_as_one(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(recipe, 7)
    monkeypatch.setattr("gossamer.train.synchronizers.stages.assign_buckets", partial(assign_buckets, bucket_bytes=1))
    for whole, parts in zip(together, run(recipe, 7), strict=True):
        assert len(parts.session._synchronizer.buckets) == 6 > len(whole.session._synchronizer.buckets)  # type: ignore[union-attr]
        for one, other in zip(whole.path, parts.path, strict=True):
            assert torch.equal(one, other)


def test_two_dtypes_are_two_buckets_of_one_turn() -> None:
    def work(worker: Worker) -> list[Tensor]:
        with seeded(worker.rank):
            model = nn.Sequential(nn.Linear(6, 4).double(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), LR)
        worker.attach(model, optimizer, "LocalSGD(4) + TopK(0.5)")
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            nn.functional.mse_loss(model[1](model[0](inputs).float()), targets.float()).backward()
            optimizer.step()
        return [parameters(layer) for layer in model]

    for layer in zip(*cluster(work, 2), strict=True):
        agree(layer)


# -- when, beside torch's ----------------------------------------------------------------------------------------------


def test_the_first_merge_is_a_period_after_start_and_torchs_averager_merges_one_step_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = PostLocalSGD(period=4, start=10).stages[-1]
    ours = [local.start + each.launch for each in local.schedule.rounds_until(20)]
    merges = list[None]()
    monkeypatch.setattr(averagers.utils, "average_parameters_or_parameter_groups", lambda *_: merges.append(None))
    group: Any = object()
    averager = averagers.PeriodicModelAverager(period=4, warmup_steps=10, process_group=group)
    theirs = []
    for step in range(1, 27):
        before = len(merges)
        averager.average_parameters(())
        theirs += [step] * (len(merges) - before)
    assert ours == [14, 18, 22, 26, 30]
    assert theirs == [11, 15, 19, 23]


@pytest.mark.parametrize(
    "strategy", [LocalSGD(4), DiLoCo(4), DiLoCo(4, outer_momentum=0.0), DiLoCo(4, mix=0.5)], ids=repr
)
def test_an_update_that_reads_no_parameters_may_be_written_over_the_mean(strategy: AveragingStrategy) -> None:
    begun, own, mean = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    apart, together = strategy.begin(begun), strategy.begin(begun)
    parameters, room = own.clone(), mean.clone()
    strategy.land(parameters, apart, mean.clone(), None)
    strategy.land(room, together, room, None)
    assert torch.equal(room, parameters) is not strategy.reads_parameters
    assert all(torch.equal(apart[key], together[key]) for key in apart)
