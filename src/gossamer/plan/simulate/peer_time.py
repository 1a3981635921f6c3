"""Peer time: workers that are not in lock step, each at its own virtual second, with servers or single peers.

A worker computes a step, and is resumed when the clock has reached the end of that step; its messages are scripts of a
PeerNetwork. One thread runs at a time: the clock's, or one worker's until its next wait. Workers of one moment continue
by rank, so that a job always has the same order of events.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from math import ceil, inf
from typing import Any

from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.bounded_mean import mean_of
from gossamer.base.peer_ops import SERVER, Peer
from gossamer.base.torch_hooks import OPTIMIZER_STEP, OPTIMIZER_STEPPED
from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.network import Network, read_network
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.events import StepEnded
from gossamer.plan.simulate.clock import StepClock, StepTimes, runs_apart
from gossamer.plan.simulate.lock_step import LockStepTime
from gossamer.plan.simulate.peer_network import PeerNetwork, VirtualEndpoint
from gossamer.plan.simulate.virtual_worker import ATTACHED, JobGate, VirtualWorker
from gossamer.plan.simulate.worker_isolation import SimulationError
from gossamer.train.parameter_server.server import host

AWAY_SECONDS = 0.2  # of this machine, for workers that return from one collective to be resumed by rank


class Turn(Enum):
    """A worker's part in the order of events."""

    RUNNING = auto()
    AWAY = auto()  # waits for a thread, or in a collective of all workers
    BACK = auto()  # that wait is over
    BLOCKED = auto()  # until its condition is true


class PeerTime:
    """The time of a job whose workers are not in lock step.

    Steps of the job are those of the worker that is ahead. Time begins when the first worker begins its first step;
    attaching takes none.

    Args:
        clock: compute times of the workers, and the lines between them.
        recipe: of the job.
        workers: their number.
        servers: number of processes that hold the parameters; 0: workers host them.
    """

    def __init__(self, clock: StepClock, recipe: Recipe, workers: int, servers: int) -> None:
        self.recipe, self._costs, self._workers = recipe, clock, workers
        self._unlimited = read_network("unlimited", workers + servers)
        self._dedicated = servers > 0
        self.events = VirtualClock()
        self.network = PeerNetwork(self.events, self._lines, self._host_of)
        self._began: float | None = None  # when the first step began
        self._moments = [0.0]  # at which the worker that was ahead has ended its steps
        self._reached = 0.0
        OPTIMIZER_STEP.subscribe(self._before_step)
        OPTIMIZER_STEPPED.subscribe(self._after_step)
        for number in range(servers):
            self.network.endpoint(Peer(SERVER, number), _never).start(host(number, keep_serving=True))

    def worker(self, *arguments: Any) -> PeerWorker:
        return PeerWorker(*arguments, time=self)

    # -- costs ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds since the first step began."""
        return 0.0 if self._began is None else self.events.now - self._began

    def costs(self) -> StepTimes:
        return self._costs.step(self.recipe, self.now)

    def part_seconds(self, rank: int) -> float:
        """Compute time of a step of a worker, at this moment."""
        found = self.costs()
        return found.part_seconds[rank] if found.part_seconds else found.seconds

    def _lines(self) -> Network:
        return self.costs().lines or self._unlimited

    def _host_of(self, peer: Peer) -> int:
        """Servers follow the workers, or share their hosts."""
        return peer.number + (self._workers if peer.kind == SERVER and self._dedicated else 0)

    # -- progress ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self._began is None:
            self._began = self.events.now

    def step_ended(self, step: int) -> None:
        """A worker has ended this step, its own."""
        if step == len(self._moments):
            self._moments.append(self.now)

    def moment(self, step: int) -> float:
        """The virtual second at which the worker that was ahead has ended a step."""
        return self._moments[min(step, len(self._moments) - 1)]

    def points(self, logged: Mapping[float, Sequence[float]]) -> list[tuple[int, float, float]]:
        """Values by second, as means over the steps of the worker that was ahead: (step, second, mean).

        A value counts for the first step that does not end earlier. After the last one, steps of the same mean length
        follow.
        """
        found: dict[int, list[float]] = {}
        ends: dict[int, float] = {}
        last, made = self._moments[-1], len(self._moments) - 1
        length = last / made if made else inf
        for second, values in sorted(logged.items()):
            step = bisect_left(self._moments, second) if second <= last else made + ceil((second - last) / length)
            found.setdefault(step, []).extend(values)
            ends[step] = self._moments[step] if step <= made else second
        return [(step, ends[step], mean_of(values)) for step, values in found.items()]

    def position(self, workers: Sequence[VirtualWorker]) -> tuple[int, float]:
        """Steps of the worker that is ahead, and the virtual second up to which all are simulated."""
        return max(worker.steps for worker in workers), self._reached

    def speed_use(self, parts: int, workers: Sequence[VirtualWorker]) -> float | None:
        """Samples per second so far, as a part of those of the same workers without communication."""
        alone = self._reached * sum(1 / self.part_seconds(worker.rank) for worker in workers)
        return parts / alone if alone else None

    # -- the order of events -------------------------------------------------------------------------------------------

    def run(self, workers: Sequence[VirtualWorker], gate: JobGate, until: Callable[[], bool] | None = None) -> None:
        """Run workers and messages in the order of virtual time, up to the limits of the gate, or `until`.

        Raises SimulationError if all wait for messages that none of them sends.
        """
        peers = [worker for worker in workers if isinstance(worker, PeerWorker)]
        while not all(worker.ended for worker in peers) and (until is None or not until()):
            following = _following(peers, gate, late=self.events.next_moment == inf)
            if gate.closed:
                with gate.changed:
                    gate.changed.wait_for(lambda: all(worker.ended for worker in peers))
            elif following is not None:
                following.resume()
            elif all(worker.settled for worker in peers) or self._at_last_step(peers, gate):
                break
            elif self.events.next_moment > self._last_moment(gate):
                self._reached = max(self._reached, gate.last_second)
                return
            elif not self.events.run_next():
                waiting = ", ".join(str(worker.rank) for worker in peers if not worker.ended)
                raise SimulationError(f"ranks {waiting} wait for messages that no worker or server sends")
        self._reached = max(self._reached, self.now)

    def _at_last_step(self, workers: Sequence[PeerWorker], gate: JobGate) -> bool:
        """Whether one has made the last step; for step 0, whether one has begun to compute."""
        return self._began is not None and max(worker.steps for worker in workers) >= gate.last_step >= ATTACHED

    def _last_moment(self, gate: JobGate) -> float:
        return inf if self._began is None else self._began + gate.last_second

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        """An optimizer is about to make its step, before sessions use its gradients."""
        if (worker := self._attached_to(optimizer)) is not None:
            worker.compute()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        """An optimizer has made its step, and sessions have exchanged its messages."""
        if (worker := self._attached_to(optimizer)) is not None:
            worker.count()

    def _attached_to(self, optimizer: Optimizer) -> PeerWorker | None:
        """The running worker, if the optimizer is that of its session."""
        worker = current_worker()
        if not isinstance(worker, PeerWorker) or worker.time is not self:
            return None
        attached = any(getattr(session, "optimizer", None) is optimizer for session in open_sessions())
        return worker if attached else None


def _following(workers: Sequence[PeerWorker], gate: JobGate, *, late: bool) -> PeerWorker | None:
    """The worker that continues now, by rank; None if all wait for a later moment. late: no event is left."""

    def at(*turns: Turn) -> list[PeerWorker]:
        return [worker for worker in workers if worker.turn in turns and not worker.ended]

    with gate.changed:
        gate.changed.wait_for(lambda: gate.closed or not at(Turn.RUNNING))
        following = next((worker for worker in at(Turn.BLOCKED) if worker.over()), None)
        if following is None and (late or not at(Turn.BLOCKED)):  # all are in a collective, and return together
            gate.changed.wait_for(lambda: gate.closed or at(Turn.BACK) or not at(Turn.AWAY))
            latest = max((worker.absences for worker in at(Turn.BACK)), default=0)
            gate.changed.wait_for(
                lambda: gate.closed or all(worker.absences > latest for worker in at(Turn.AWAY)), AWAY_SECONDS
            )
        return following or next(iter(at(Turn.BACK)), None)


def _never(over: Callable[[], bool], until: float) -> None:
    raise AssertionError("a server that is its own process waits for none of its scripts")


class PeerWorker(VirtualWorker):
    """One worker with its own virtual second: a thread that runs when it is its turn."""

    def __init__(self, *arguments: Any, time: PeerTime) -> None:
        super().__init__(*arguments)
        self.time = time
        self.turn, self.over = Turn.RUNNING, _always
        self.absences = 0  # collectives so far; those of a worker that others wait for are fewer
        self._held = self._hooked = False
        self._waited = 0.0  # virtual seconds of the current step in which it waits for messages

    @property
    def settled(self) -> bool:
        return self.ended or self._held

    # -- turns

    def resume(self) -> None:
        """Run it until its next wait. Called by the thread that runs the clock."""
        with self._gate.changed:
            self.turn = Turn.RUNNING
            self._gate.changed.notify_all()

    def _pause(self, turn: Turn, over: Callable[[], bool]) -> None:
        with self._gate.changed:
            self.turn, self.over = turn, over
            self._gate.changed.notify_all()
            self._gate.changed.wait_for(lambda: self._gate.closed or self.turn is Turn.RUNNING)

    def _await_turn(self) -> None:
        self._pause(Turn.BLOCKED, _always)
        super()._await_turn()

    def block(self, over: Callable[[], bool], until: float = inf) -> None:
        """Wait in virtual time until `over()`, or for a moment."""
        self._leave_if_closed()
        if over():
            return
        events = self.time.events
        if until < inf:
            events.at(until, _always)
        began = events.now
        self._baton.give()
        self._pause(Turn.BLOCKED, lambda: over() or events.now >= until)
        self._baton.take(self._state)
        self._waited += events.now - began
        self._leave_if_closed()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if threading.current_thread() is not self._thread:  # a communication thread has no turn
            yield
            return
        self._baton.give()
        with self._gate.changed:
            self.met, self.turn, self.absences = True, Turn.AWAY, self.absences + 1
            self._gate.changed.notify_all()
        try:
            yield
        finally:
            self._pause(Turn.BACK, _always)
            self._baton.take(self._state)
            self._leave_if_closed()

    def wait_for(self, condition: threading.Condition, over: Callable[[], bool]) -> None:
        condition.release()
        try:
            self.block(over)
        finally:
            condition.acquire()

    def endpoint(self, peer: Peer) -> VirtualEndpoint:
        return self.time.network.endpoint(peer, self.block)

    # -- steps

    def begin_training(self) -> None:
        self._held = True
        self.block(lambda: self._gate.last_step >= ATTACHED)
        self._held = False

    def compute(self) -> None:
        """Compute a step, before the messages with which it ends."""
        self._hooked = True
        self.time.begin_step()
        self._spend(self.time.part_seconds(self.rank))

    def count(self) -> None:
        """A step has ended."""
        self.steps, self.parts = self.steps + 1, self.parts + 1
        self.time.step_ended(self.steps)

    def _spend(self, seconds: float) -> None:
        waited, until = self._waited, self.time.events.now + seconds
        self.block(lambda: self.time.events.now >= until, until)
        self._waited = waited

    def step_ended(self, event: StepEnded) -> None:
        self.bytes_sent += event.bytes_sent
        if not self._hooked:  # a session of arrays, whose optimizer is not torch's
            self.compute()
            self.count()
            self._hooked = False

    def point(self) -> float:
        return self.time.now

    def now(self) -> float:
        return self.time.now

    def step_costs(self, measured: Mapping[str, float]) -> Mapping[str, float]:
        """Costs of a step on the virtual clock; its bytes are real, and scripts take no time."""
        waited, self._waited = self._waited, 0.0
        return {
            **measured,
            "waiting_seconds": waited,
            "encode_seconds": 0.0,
            "wire_seconds": waited,
            "decode_seconds": 0.0,
        }

    def compute_seconds(self, measured: float, parts: int) -> float:
        return parts * self.time.part_seconds(self.rank)

    def exchanged(self) -> None:
        if self.time.now:
            self._spend(self.time.costs().exchange_seconds)


def _always() -> bool:
    return True


def job_time(clock: StepClock, recipe: Recipe, workers: int, servers: int) -> LockStepTime | PeerTime:
    """The time of a job's workers: one of all, or each its own."""
    return PeerTime(clock, recipe, workers, servers) if runs_apart(recipe) else LockStepTime(clock, recipe, workers)
