"""Simulated job: trains all workers of a user's script in this process, with real sessions and in virtual time.

Also here: a factor for the learning rates of a script's optimizers, and the memory of all workers.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn, TextIO

from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe, automatic, resolve
from gossamer.base.layout import dtype_of
from gossamer.base.torch_hooks import OPTIMIZER_STEP, OPTIMIZER_STEPPED
from gossamer.base.units import bytes_text
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.events import (
    Attached,
    Closed,
    Event,
    Logged,
    Noticed,
    RecipeSwitched,
    SharesChanged,
    StepEnded,
    subscribe,
)
from gossamer.observe.comparison import is_loss
from gossamer.plan.simulate.clock import StepClock
from gossamer.plan.simulate.peer_time import job_time
from gossamer.plan.simulate.virtual_worker import (
    ATTACHED,
    JobClosed,
    JobGate,
    VirtualGroups,
    VirtualWorker,
    VirtualWorld,
)
from gossamer.plan.simulate.worker_isolation import Baton, ProcessState, SimulationError, guarded, routed
from gossamer.train.traffic.traffic import estimate_traffic

# -- learning rates ----------------------------------------------------------------------------------------------------


class LearningRateFactor:
    """Multiplies the rate of every parameter group for the duration of optimizer.step(), on workers selected by `here`.

    It wraps the hooks of sessions, which see the multiplied rate. Between steps the groups have the rates of the
    script's schedulers, so that rates computed from the last one are not multiplied again.
    """

    def __init__(self, factor: float, here: Callable[[], bool]) -> None:
        self._factor, self._here = factor, here
        self._before: dict[int, list[tuple[dict[str, Any], Any]]] = {}  # groups and their own rates, by optimizer
        self._hooks = (
            OPTIMIZER_STEP.subscribe(self._multiply),
            OPTIMIZER_STEPPED.subscribe(self._put_back),
        )

    def _multiply(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if not self._here():
            return
        multiplied = {id(group) for groups in self._before.values() for group, _ in groups}  # by a wrapping optimizer
        own = [
            (group, group["lr"]) for group in optimizer.param_groups if "lr" in group and id(group) not in multiplied
        ]
        self._before[id(optimizer)] = own
        for group, rate in own:
            group["lr"] = rate * self._factor

    def _put_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        for group, rate in self._before.pop(id(optimizer), ()):
            group["lr"] = rate

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


# -- memory ------------------------------------------------------------------------------------------------------------


FLOAT_BYTES = 4
OPTIMIZER_COPIES = 2  # of the parameters, as in Adam; SGD with momentum has one, without it zero
KEPT_BYTES = 0.1  # fraction of the free memory for everything else


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of all workers together, without the script's own data and activations."""

    workers: int
    parts: Mapping[str, float]  # of one worker, by name

    @property
    def worker_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def total_bytes(self) -> float:
        return self.workers * self.worker_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in self.parts.items() if nbytes)
        return (
            f"{bytes_text(self.total_bytes)} for {self.workers} workers, each {bytes_text(self.worker_bytes)}: {parts}"
        )

    def refuse_beyond(self, free_bytes: float) -> None:
        """Raise SimulationError with the line to write instead if the machine has too little memory."""
        room = (1 - KEPT_BYTES) * free_bytes
        if self.total_bytes <= room:
            return
        fitting = int(room / self.worker_bytes)
        instead = f"Write --workers {fitting}" if fitting > 1 else "Take a smaller model"
        raise SimulationError(
            f"{self.workers} workers would need {self} and {bytes_text(free_bytes)} are free, so the machine would "
            f"swap or kill this process. {instead}, or simulate on a larger machine."
        )


def estimate_memory(recipe: Recipe, model: Attached, workers: int) -> MemoryEstimate:
    """Estimate from the first worker's Attached event."""
    trained = sum(layout.numel * dtype_of(dtype).itemsize for dtype, layout in model.layouts)
    frozen = FLOAT_BYTES * (model.parameters - sum(layout.numel for _, layout in model.layouts))
    traffic = estimate_traffic(recipe, model, workers=workers)
    parts = {
        "model": trained + frozen,
        "optimizer": OPTIMIZER_COPIES * trained,
        "gradients": trained,
        "buckets": trained,
        "residuals": traffic.residual_bytes,
        "other state": traffic.other_state_bytes + traffic.strategy_bytes,
    }
    return MemoryEstimate(workers=workers, parts=parts)


def free_bytes(root: Path = Path("/")) -> float:
    """Memory available to this process: the machine's, or the rest of its cgroup's.

    Cached files count as free: the kernel drops them when a process needs the memory.
    """
    machine = _machine_bytes(root / "proc/meminfo")
    group = root / "sys/fs/cgroup"
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return machine
    return min(machine, limit - used + _cached_bytes(group / "memory.stat"))


def _cached_bytes(file: Path) -> float:
    """Memory of a cgroup that holds files, without shared memory."""
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return sum(float(number) for name, number in lines if name in ("active_file", "inactive_file"))


def _machine_bytes(file: Path) -> float:
    lines = dict(line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines()) if file.exists() else {}
    return 1024 * float(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else float("inf")


def _number(file: Path) -> float | None:
    text = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    return float(text) if text.isdecimal() else None


# -- the job -----------------------------------------------------------------------------------------------------------

NOT_ALONE = ("GOSSAMER_COORDINATOR", "GOSSAMER_REJOIN", "GOSSAMER_PACED", "GOSSAMER_RUN_DIRECTORY")
Metrics = dict[str, list[tuple[int, float, float]]]  # by name: (step, virtual seconds, value)


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """Progress of a simulated job."""

    steps: int  # of rank 0; without lock step, of the worker that is ahead
    seconds: float  # virtual, since the first step began
    metrics: Metrics  # logged by workers, means over those that logged, as in a run's record
    bytes_sent: float  # payload of all steps so far, mean over workers
    parts: int  # backward passes of all workers so far; samples, if each makes one pass of its share of a step
    speed_use: float | None  # samples per second, as a part of those of the workers without communication, if known
    ended: bool  # whether the script has ended on every worker
    failure: str | None  # reason of a failure
    recipe: str  # the current one
    digest: str | None = None  # of the merged parameters, after rank 0's session is closed
    diverged: bool = False  # whether the failure is a loss that is not finite


@dataclass
class _WorkerReports:
    """Reports of workers so far."""

    logged: dict[str, dict[float, list[float]]] = field(default_factory=dict)  # by name and VirtualWorker.point
    notices: list[str] = field(default_factory=list)
    digest: str | None = None
    failure: str | None = None
    diverged: bool = False
    model: Attached | None = None


class SimulatedJob:
    """`workers` workers that train `script` with `recipe`, each in a thread, one of which runs user code at a time.

    All computation and communication of workers is real; only the time is `clock`'s. Between calls all workers are
    paused, so several jobs can take turns in one process.

    Args:
        script: of the user.
        arguments: of the script.
        recipe: replaces the script's own.
        workers: number of workers.
        clock: step times in virtual seconds.
        learning_rate_factor: multiplies the learning rate of every step of the script's optimizers.
        servers: processes that hold the parameters of a recipe with servers, on hosts after the workers'; 0: workers
            host them.
        output: stream of rank 0's output; output of other ranks is discarded.

    Raises:
        SimulationError: the recipe is of federated learning.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        recipe: str,
        workers: int,
        *,
        clock: StepClock,
        learning_rate_factor: float = 1.0,
        servers: int = 0,
        output: TextIO | None = None,
    ) -> None:
        self._script, self._clock, self._count = script, clock, workers
        self._recipe = resolve(recipe, workers)  # the first one, for a recipe that is chosen while training
        self._written = recipe if automatic(recipe) else repr(self._recipe)
        self._servers = servers
        self._time = job_time(clock, self._recipe, workers, servers)
        self._gate, self._groups, self._reports = JobGate(self._time.moment), VirtualGroups(workers), _WorkerReports()
        self._nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._output = output or self._nowhere
        self._baton = Baton(ProcessState(script.resolve().parent))
        self._workers = [
            self._time.worker(
                rank,
                script,
                ProcessState.of_worker(script, arguments, self._environment(rank), rank),
                self._baton,
                self._gate,
                self._output if rank == 0 else self._nowhere,
            )
            for rank in range(workers)
        ]
        self._handlers: Mapping[type[Event], Callable[[VirtualWorker, Any], None]] = {
            Attached: self._attached,
            StepEnded: self._step_ended,
            SharesChanged: self._shares_changed,
            Logged: self._logged,
            Noticed: self._noticed,
            RecipeSwitched: self._switched,
            Closed: self._closed,
        }
        self._rates = LearningRateFactor(learning_rate_factor, lambda: current_worker() in self._workers)
        self._unsubscribe: Callable[[], None] | None = None
        self.memory: MemoryEstimate | None = None  # after `begin`

    def _environment(self, rank: int) -> dict[str, str | None]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._count, "LOCAL_WORLD_SIZE": self._count}
        return {
            **{name: str(number) for name, number in place.items()},
            **dict.fromkeys(NOT_ALONE),
            "GOSSAMER_RECIPE": self._written,
            "GOSSAMER_SERVERS": ",".join(f"server-{number}:1" for number in range(self._servers)),
            "GOSSAMER_RECORD": "",
            "GOSSAMER_LOG_TO": "",
            "GOSSAMER_QUIET": "1",
        }

    # -- from outside --------------------------------------------------------------------------------------------------

    def begin(self) -> MemoryEstimate | None:
        """Run the first worker up to gossamer.attach. Return the memory of all workers; None if it did not attach.

        Raises SimulationError if that exceeds the machine's memory.
        """
        if self._unsubscribe is None:
            self._clock.step(self._recipe, 0.0)  # may profile, which must not be disturbed
            self._unsubscribe = subscribe(self._handle)
            first, *others = self._workers
            self._go_on(-1, 0.0, start=[first], until=lambda: first.settled or first.met)
            if not first.settled:  # its script communicates before it attaches
                self._go_on(-1, 0.0, start=others)
            if self._reports.model is not None and not first.ended:
                self.memory = estimate_memory(self._recipe, self._reports.model, self._count)
                self.memory.refuse_beyond(free_bytes())
                self._go_on(ATTACHED, 0.0, start=[worker for worker in others if not worker.begun])
        return self.memory

    def advance(self, *, steps: int | None = None, seconds: float | None = None) -> JobProgress:
        """Run all workers up to this total of steps or virtual seconds; by default until the script ends."""
        self.begin()
        self._go_on(math.inf if steps is None else steps, math.inf if seconds is None else seconds)
        return self.progress

    @property
    def progress(self) -> JobProgress:
        steps, seconds = self._time.position(self._workers)
        parts = sum(worker.parts for worker in self._workers)
        return JobProgress(
            steps=steps,
            seconds=seconds,
            metrics={name: self._time.points(logged) for name, logged in self._reports.logged.items()},
            bytes_sent=fmean(worker.bytes_sent for worker in self._workers),
            parts=parts,
            speed_use=self._time.speed_use(parts, self._workers),
            ended=all(worker.ended for worker in self._workers if worker.begun),
            failure=self._reports.failure,
            recipe=repr(self._time.recipe),
            digest=self._reports.digest,
            diverged=self._reports.diverged,
        )

    def close(self) -> None:
        """End all workers by an exception in their scripts that is not an Exception."""
        if self._unsubscribe is not None:
            self._end_all()
            self._go_on(-1, 0.0)
            self._unsubscribe()
            self._unsubscribe = None
        self._rates.remove()
        self._workers_gone()

    def _workers_gone(self) -> None:
        for worker in self._workers:
            worker.join()
        self._nowhere.close()
        gc.collect()  # models in reference cycles of frames and modules

    def _go_on(
        self,
        last_step: float,
        last_second: float,
        start: Sequence[VirtualWorker] = (),
        until: Callable[[], bool] | None = None,
    ) -> None:
        with self._running():
            for worker in start:
                worker.start(VirtualWorld(worker.rank, self._groups), self._worker_ended)
            self._gate.open(last_step, last_second)
            try:
                self._time.run([worker for worker in self._workers if worker.begun], self._gate, until)
            except SimulationError as stuck:
                self._reports.failure = str(stuck)
                self._end_all()
            self._baton.retire()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with guarded(self._notice), routed():
            yield

    # -- in virtual time -----------------------------------------------------------------------------------------------

    def _switched(self, worker: VirtualWorker, event: RecipeSwitched) -> None:
        """All workers switch after the same step, to the same recipe."""
        self._time.recipe = resolve(event.after, self._count)

    # -- reported by workers, in their threads -------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        worker = next((worker for worker in self._workers if worker is current_worker()), None)
        if handler is not None and worker is not None:
            handler(worker, event)

    def _attached(self, worker: VirtualWorker, event: Attached) -> None:
        if worker.attached:
            self._fail(
                worker,
                "the script attaches twice, and step times are estimated for one model only. Simulate the part that "
                "trains one, or train by gossamer run --network SPEC",
            )
        worker.attached = True
        if self._reports.model is None:
            self._reports.model, self._time.recipe = event, resolve(event.recipe, self._count)
        worker.begin_training()

    def _step_ended(self, worker: VirtualWorker, event: StepEnded) -> None:
        worker.step_ended(event)

    def _shares_changed(self, worker: VirtualWorker, event: SharesChanged) -> None:
        worker.change_shares(event.step, event.shares)

    def _logged(self, worker: VirtualWorker, event: Logged) -> None:
        for name, value in event.values.items():
            if is_loss(name) and not math.isfinite(value):
                self._reports.diverged = self._reports.failure is None
                self._fail(worker, f"{name} is {value}")
            self._reports.logged.setdefault(name, {}).setdefault(worker.point(), []).append(value)

    def _noticed(self, worker: VirtualWorker, event: Noticed) -> None:
        if worker.rank == 0:
            self._notice(event.message)

    def _notice(self, message: str) -> None:
        if message not in self._reports.notices:
            self._reports.notices.append(message)
            print(f"gossamer: {message}", file=self._output)

    def _closed(self, worker: VirtualWorker, event: Closed) -> None:
        if worker.rank == 0 and event.ended == "finished":
            self._reports.digest = event.digest

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _worker_ended(self, worker: VirtualWorker, failure: str | None) -> None:
        if failure is None and not worker.attached and not self._gate.closed:
            failure = (
                f"{self._script} ended before it called gossamer.attach, so there is nothing to simulate. Pass the "
                "arguments of a training after its name"
            )
        if failure is not None:
            self._note_failure(worker, failure)
        self._groups.close(worker.rank)

    def _fail(self, worker: VirtualWorker, failure: str) -> NoReturn:
        self._note_failure(worker, failure)
        raise JobClosed

    def _note_failure(self, worker: VirtualWorker, failure: str) -> None:
        """The first failure ends the job; later ones are its consequences."""
        if self._reports.failure is None and not self._gate.closed:
            self._reports.failure = f"rank {worker.rank} failed after step {worker.steps}: {failure}"
            self._end_all()

    def _end_all(self) -> None:
        self._gate.close()
        self._groups.leave()
