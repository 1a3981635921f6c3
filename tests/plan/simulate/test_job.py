"""A simulated job is the real run, but for its time."""

from __future__ import annotations

import gc
import io
import math
import os
import random
import re
import subprocess
import sys
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.nightly import nightly
from support.simulated_scripts import SteadyClock, finished, script, simulated
from torch.optim import SGD, Optimizer

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.comm.simulated import SimulatedGroup
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.plan.simulate import SimulationError, job, virtual_worker
from gossamer.plan.simulate.job import LearningRateFactor, estimate_memory, free_bytes
from gossamer.plan.simulate.virtual_worker import JobClosed, VirtualTransport
from gossamer.plan.simulate.worker_isolation import ProcessState


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return script(tmp_path)


def trained(file: Path, *, workers: int = 4, steps: int = 6, recipe: str = "Dense()") -> str:
    """What the script prints of its parameters at the end."""
    output = io.StringIO()
    progress = finished(simulated(file, steps, recipe=recipe, workers=workers, output=output))
    assert progress.failure is None
    assert progress.steps == steps
    return _sums(output.getvalue())


def _sums(text: str) -> str:
    return next(line[line.index("sums") :] for line in text.splitlines() if "sums" in line)


# -- the law: the same bits as real processes, of whose sums every order gives the same --------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("recipe", ["LocalSGD(period=2)", *nightly("Dense()")])
def test_it_is_what_processes_compute(file: Path, recipe: str) -> None:
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "4", "--recipe", recipe, str(file), "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True, check=True)
    assert trained(file, recipe=recipe) == _sums(run.stdout + run.stderr)


def _draws_together(state: ProcessState) -> None:
    """Twin: the workers draw from one generator."""
    state.random = torch.get_rng_state(), random.getstate(), np.random.get_state()


def test_without_a_random_state_of_its_own_a_worker_draws_otherwise(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, restore = trained(file), ProcessState.restore

    def twin(state: ProcessState) -> None:
        _draws_together(state)
        restore(state)

    assert trained(file) == right
    monkeypatch.setattr(ProcessState, "restore", twin)
    assert trained(file) != right


def test_with_swapped_ranks_it_is_another_training(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, own = trained(file), VirtualTransport.__init__

    def twin(transport: VirtualTransport, group: SimulatedGroup, rank: int) -> None:
        own(transport, group, group.world - 1 - rank)

    monkeypatch.setattr(VirtualTransport, "__init__", twin)
    assert trained(file) != right


# -- pauses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(density=0.1)", "LocalSGD(period=3)", "DelayedAveraging(delay=1)"])
def test_pauses_change_nothing(file: Path, recipe: str) -> None:
    whole = finished(simulated(file, 7, recipe=recipe))
    halting = simulated(file, 7, recipe=recipe)
    seen = [halting.advance(steps=steps) for steps in (1, 2, 5)]
    seen.append(halting.advance(seconds=3.0))
    assert [each.steps for each in seen] == [1, 2, 5, 6]
    assert [each.seconds for each in seen] == [0.5, 1.0, 2.5, 3.0]
    assert [each.metrics["loss"] for each in seen] == [whole.metrics["loss"][: each.steps] for each in seen]
    assert not any(each.ended for each in seen)
    assert finished(halting) == whole
    assert whole.digest is not None


def test_jobs_that_take_turns_are_jobs_in_turn(file: Path) -> None:
    recipes = ["Dense()", "TopK(density=0.1)", "LocalSGD(period=2)"]
    in_turn = [finished(simulated(file, 6, recipe=recipe, workers=3)) for recipe in recipes]
    assert len({each.digest for each in in_turn}) == 3
    jobs = [simulated(file, 6, recipe=recipe, workers=3) for recipe in recipes]
    for steps in (1, 2, 4, 6):
        assert {each.advance(steps=steps).steps for each in jobs} == {steps}
    assert [finished(each) for each in jobs] == in_turn


def test_the_process_is_left_as_it_was(file: Path) -> None:
    import_module("torch._dynamo")  # the first optimizer step of a process imports it, and it sets variables
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = dict(os.environ), sys.argv, list(sys.path), sys.modules["__main__"], sys.stdout, os.getcwd()
    paused = simulated(file, 6)
    paused.advance(steps=2)
    assert (dict(os.environ), sys.argv, list(sys.path), sys.modules["__main__"], sys.stdout, os.getcwd()) == before
    assert torch.equal(torch.rand(3), expected)
    paused.close()
    assert open_sessions() == []


def test_what_others_draw_between_two_calls_changes_nothing(file: Path) -> None:
    whole = finished(simulated(file, 4))
    halting = simulated(file, 4)
    for steps in range(1, 4):
        halting.advance(steps=steps)
        torch.manual_seed(steps)
        random.seed(steps)
    assert finished(halting) == whole


# -- virtual time ------------------------------------------------------------------------------------------------------


def test_steps_take_what_the_clock_says_when_they_begin(file: Path) -> None:
    clock = SteadyClock(seconds=0.5, later=2.0, since=1.0)
    halting = simulated(file, 6, clock=clock)
    assert halting.advance(seconds=0.4).steps == 0
    assert halting.advance(seconds=4.9).steps == 3  # ends at 0.5, 1, 3, 5, ...
    ended = finished(halting)
    assert [seconds for _, seconds, _ in ended.metrics["loss"]] == [0.5, 1.0, 3.0, 5.0, 7.0, 9.0]
    assert ended.seconds == 9.0


def test_bytes_are_those_of_a_real_step(file: Path) -> None:
    dense, sparse = (finished(simulated(file, 4, recipe=recipe)) for recipe in ("Dense()", "TopK(density=0.1)"))
    parameters = 5 * 64 + 64 + 64 + 1
    assert 8 * parameters < dense.bytes_sent / 4 < 8 * parameters + 120  # and a step's report
    assert sparse.bytes_sent < dense.bytes_sent


# -- the learning rate -------------------------------------------------------------------------------------------------

RATES = """
    import sys, torch, gossamer
    world = gossamer.init()
    model = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
    session = gossamer.attach(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 1).double()).sum().backward()
        optimizer.step()
        scheduler.step()
        session.log(weight=model.weight.item(), rate=optimizer.param_groups[0]["lr"])
"""


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_factor_multiplies_each_step_and_no_schedule(tmp_path: Path, factor: float) -> None:
    metrics = finished(simulated(script(tmp_path, RATES), learning_rate_factor=factor)).metrics
    assert [value for _, _, value in metrics["weight"]] == [-factor * total for total in (1.0, 1.5, 1.75, 1.875)]
    assert [value for _, _, value in metrics["rate"]] == [0.5, 0.25, 0.125, 0.0625]


def test_workers_that_log_huge_and_infinite_numbers_have_their_means(tmp_path: Path) -> None:
    logged = 'session.log(huge=1e308, both=float("inf") * (1 - 2 * (world.rank % 2)))'
    metrics = finished(simulated(script(tmp_path, RATES + " " * 8 + logged))).metrics
    assert [value for _, _, value in metrics["huge"]] == [1e308] * 4
    assert all(math.isnan(value) for _, _, value in metrics["both"])


# -- ends --------------------------------------------------------------------------------------------------------------

LOOP = """
    import sys, torch, gossamer
    world = gossamer.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = gossamer.attach(model, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        optimizer.step()
        {body}
"""


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("if step == 2 and world.rank == 1: raise ValueError('no data')", "rank 1 failed after step 3: ValueError: no"),
        ("if step == 2 and world.rank == 1: sys.exit(3)", r"rank 1 failed after step 3: it called sys.exit\(3\)"),
        (
            "session.log(loss=float('nan') if step == 4 and world.rank else 1.0)",
            "rank 1 failed after step 5: loss is n",
        ),
        (
            "if step == 1 and world.is_first: break",
            r"rank 1 failed after step 2: PeerLost: rank 0 has left while rank 1",
        ),
        ("session = gossamer.attach(model, optimizer, replace=True)", "attaches twice"),
        ("torch.distributed.init_process_group('gloo')", "uses torch.distributed directly.*gossamer run"),
    ],
)
def test_failures_name_rank_and_step(tmp_path: Path, body: str, failure: str) -> None:
    ended = finished(simulated(script(tmp_path, LOOP.replace("{body}", body))))
    assert ended.ended
    assert ended.failure is not None
    assert re.search(failure, ended.failure), ended.failure


def test_an_infinite_metric_that_is_no_loss_ends_nothing(tmp_path: Path) -> None:
    body = "session.log(loss=1.0, packet_loss=float('inf'), loss_scale=float('inf'), gloss=float('nan'))"
    ended = finished(simulated(script(tmp_path, LOOP.replace("{body}", body))))
    assert (ended.steps, ended.failure, ended.diverged) == (8, None, False)


def test_a_script_that_ends_early_or_never_attaches_is_no_success(tmp_path: Path) -> None:
    early = simulated(script(tmp_path), 3)
    ended = early.advance(steps=5)
    early.close()
    assert (ended.steps, ended.ended, ended.failure) == (3, True, None)
    never = finished(simulated(script(tmp_path, "print('no model')", "none.py")))
    assert never.ended
    assert "ended before it called gossamer.attach" in str(never.failure)


@pytest.mark.parametrize("kind", ["Exception", "BaseException"])
def test_a_paused_script_ends_where_it_stands(tmp_path: Path, kind: str) -> None:
    text = LOOP.replace("{body}", "continue").replace("range(8)", "iter(int, 1)")  # for ever
    text = text.replace(
        "        loss.backward()",
        f"""
        try:
            loss.backward()
        except {kind}:
            pass""",
    )
    halting = simulated(script(tmp_path, text), workers=3)
    assert halting.advance(steps=3).steps == 3
    halting.close()
    assert halting.progress.ended
    assert open_sessions() == []


def test_a_job_may_be_closed_before_it_began_and_twice(file: Path) -> None:
    idle = simulated(file, 3)
    idle.close()
    idle.close()


def test_more_than_the_machine_has_is_refused_before_others_begin(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "free_bytes", lambda: 200_000.0)
    output = io.StringIO()
    greedy = simulated(file, 3, workers=16, output=output)
    with pytest.raises(SimulationError, match=r"16 workers would need .* for 16 workers.*Write --workers \d"):
        greedy.advance(steps=1)
    greedy.close()
    monkeypatch.setattr(job, "free_bytes", lambda: 1e9)
    fitting = simulated(file, 3, workers=16)
    assert fitting.begin() is not None
    assert finished(fitting).failure is None


def _linears_left(file: Path) -> int:
    """Layers of a job that was closed while it was paused."""
    gc.collect()
    before = len(_linears())
    halting = simulated(file, 5)
    halting.advance(steps=2)
    assert len(_linears()) == before + 4
    halting.close()
    del halting
    gc.collect()
    return len(_linears()) - before


def _linears() -> list[object]:
    return [each for each in gc.get_objects() if type(each) is torch.nn.Linear]


def test_a_closed_job_holds_no_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _linears_left(file) == 0
    kept: weakref.WeakSet[Any] = weakref.WeakSet()
    # twin: what failed is kept with its frames
    monkeypatch.setattr(virtual_worker, "_leave_sessions", lambda: kept.update(open_sessions()))
    assert _linears_left(file) > 0
    for session in list(kept):
        session.__exit__(JobClosed, None, None)


def test_federated_recipes_are_refused(file: Path) -> None:
    with pytest.raises(SimulationError, match="gossamer federate"):
        simulated(file, recipe="FedAvg(local_steps=2)")


# -- what workers see --------------------------------------------------------------------------------------------------

PLACES = """
    import os, sys, helper, gossamer, torch
    from pathlib import Path
    from torch.utils.data import DataLoader, TensorDataset
    world = gossamer.init()
    assert sys.modules["__main__"].__dict__ is globals()
    assert Path(sys.path[0], Path(sys.argv[0]).name) == Path(__file__), sys.path[0]
    assert [world.rank, world.size] == [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")]
    assert helper.rank == world.rank
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert gossamer.gather(world.rank) == list(range(world.size))
    session = gossamer.attach(model, optimizer)
    assert gossamer.gather(world.rank) == list(range(world.size))
    data = TensorDataset(torch.arange(14).reshape(7, 2).float())
    loader = DataLoader(data, batch_size=2, sampler=world.shard(data), num_workers=3, persistent_workers=True)
    seen = []
    for epoch in range(2):
        with session.epoch():
            for (batch,) in loader:
                seen += batch[:, 0].tolist()
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    every = [number for text in gossamer.gather(" ".join(map(str, seen))) for number in text.split()]
    assert sorted(map(float, every)) == sorted(2 * [2.0 * sample for sample in range(7)])
    session.log(seen=len(every))
    print("rank", world.rank)
"""


WORLD_CALLS = """
    import gossamer, torch
    from datetime import timedelta
    world = gossamer.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def call():
        world.barrier()
        world.barrier(timeout=timedelta(hours=1))
        assert world.broadcast({"rank": world.rank}, root=2) == {"rank": 2}
        assert world.all_gather(str(world.rank)) == ["0", "1", "2"]
        assert world.all_reduce(torch.ones(4), "sum").tolist() == [3.0] * 4
    call()
    with gossamer.attach(model, optimizer) as session:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            call()
        session.log(steps=session.stats.run.steps)
"""


def test_calls_of_the_world_meet_the_other_workers(tmp_path: Path) -> None:
    ended = finished(simulated(script(tmp_path, WORLD_CALLS), workers=3))
    assert ended.failure is None
    assert ended.metrics["steps"][-1][2] == 2


def test_each_worker_is_in_a_world_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import gossamer\nrank = gossamer.init().rank\n")
    output = io.StringIO()
    ended = finished(simulated(script(tmp_path, PLACES), workers=3, output=output))
    assert ended.failure is None
    assert ended.metrics["seen"][-1][2] == 14
    assert "helper" not in sys.modules
    assert output.getvalue().count("rank 0") == 1
    assert "rank 1" not in output.getvalue()
    assert output.getvalue().count("DataLoader requests 3 processes") == 1


def test_many_workers_train(file: Path) -> None:
    assert trained(file, workers=64, steps=2)


# -- learning rate -----------------------------------------------------------------------------------------------------


class Wrapping(Optimizer):
    """Steps through another, whose groups it shows as its own, as SAM and Lookahead do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([group["params"][0] for group in inner.param_groups], {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        self.inner.step()


def moved(optimizer: Optimizer, parameter: torch.Tensor) -> float:
    parameter.data.zero_()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return -parameter.item()


def test_steps_are_multiplied_and_rates_stay() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    plain = SGD([parameter], lr=0.5)
    wrapping = Wrapping(SGD([parameter], lr=0.5))
    here = True
    factor = LearningRateFactor(4.0, lambda: here)
    assert (moved(plain, parameter), moved(wrapping, parameter)) == (2.0, 2.0)
    assert (plain.param_groups[0]["lr"], wrapping.param_groups[0]["lr"]) == (0.5, 0.5)
    here = False
    assert moved(plain, parameter) == 0.5
    here = True
    factor.remove()
    assert moved(plain, parameter) == 0.5


# -- memory estimate ---------------------------------------------------------------------------------------------------


PARAMETERS = 10_000_000


@pytest.mark.parametrize(("recipe", "residuals"), [("Dense()", 0.0), ("TopK(density=0.01)", 4.0)])
def test_each_worker_has_its_own(recipe: str, residuals: float) -> None:
    resolved = resolve(recipe, 8)
    found = estimate_memory(resolved, assumed(PARAMETERS, resolved), 8)
    assert found.parts["model"] == found.parts["gradients"] == pytest.approx(4 * PARAMETERS, rel=0.05)
    assert found.parts["residuals"] == pytest.approx(residuals * PARAMETERS, rel=0.05)
    assert found.total_bytes == 8 * sum(found.parts.values())
    assert ("residuals" in str(found)) == bool(residuals)


def test_a_refusal_reports_how_many_workers_fit() -> None:
    resolved = resolve("Dense()", 64)
    found = estimate_memory(resolved, assumed(PARAMETERS, resolved), 64)
    found.refuse_beyond(2 * found.total_bytes)
    with pytest.raises(SimulationError, match=r"64 workers would need .*Write --workers \d+") as refused:
        found.refuse_beyond(found.total_bytes / 2)
    fitting = re.search(r"--workers (\d+)", str(refused.value))
    assert fitting is not None
    assert int(fitting[1]) * found.worker_bytes < found.total_bytes / 2
    with pytest.raises(SimulationError, match="Take a smaller model"):
        found.refuse_beyond(found.worker_bytes)


def test_memory_is_free_as_far_as_the_control_group_allows(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    assert free_bytes(tmp_path) == float("inf")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    2000 kB\n")
    (group / "memory.current").write_text("500000\n")
    (group / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) == 2_048_000
    (group / "memory.max").write_text("1500000\n")
    assert free_bytes(tmp_path) == 1_000_000
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("anon 1\nfile 9\nactive_file 200000\ninactive_file 300000\n")
    assert free_bytes(tmp_path) == 1_500_000
