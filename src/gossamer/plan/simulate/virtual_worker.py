"""Virtual worker: runs a user's script in a thread, as one of several workers of a process, with its own world."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from traceback import extract_tb
from typing import TextIO

import torch

from gossamer.base.transport import Transport
from gossamer.comm.runtime import worker_scope
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.comm.simulated import SimulatedGroup, SimulatedTransport
from gossamer.events import StepEnded
from gossamer.plan.simulate.worker_isolation import Baton, ProcessState, sink
from gossamer.train.world_state import WorldState, place

# -- its world ---------------------------------------------------------------------------------------------------------


class VirtualGroups:
    """The groups of one simulated job, in the order of their requests by workers."""

    def __init__(self, workers: int) -> None:
        self.workers, self._broken = workers, False
        self._groups: list[SimulatedGroup] = []
        self._closed: set[int] = set()  # ranks
        self._lock = threading.Lock()

    def group(self, number: int) -> SimulatedGroup:
        with self._lock:
            while len(self._groups) <= number:
                self._groups.append(self._fresh())
            return self._groups[number]

    def _fresh(self) -> SimulatedGroup:
        group = SimulatedGroup(self.workers, threading.TIMEOUT_MAX)  # a job may be paused for long
        for rank in self._closed:
            group.close(rank)
        if self._broken:
            group.leave()
        return group

    def close(self, rank: int) -> None:
        """The script of this rank has ended: raise in ranks that wait for it, now or later."""
        with self._lock:
            self._closed.add(rank)
            for group in self._groups:
                group.close(rank)

    def leave(self) -> None:
        """Break all groups, so that no rank waits."""
        with self._lock:
            self._broken = True
            for group in self._groups:
                group.leave()


class VirtualTransport(SimulatedTransport):
    """One worker's end of a group, in which texts take virtual time, too."""

    def all_gather_text(self, text: str) -> list[str]:
        received = super().all_gather_text(text)
        current_worker().exchanged()
        return received


class VirtualWorld(WorldState):
    """One worker's world, on the CPU: gradients of a GPU are complete in threads that all workers share."""

    def __init__(self, rank: int, groups: VirtualGroups) -> None:
        super().__init__(rank=rank, size=groups.workers, local_rank=rank, device=torch.device("cpu"))
        self._groups, self._numbers = groups, count()

    def own_transport(self) -> Transport:
        """This worker's end of the job's next group."""
        return VirtualTransport(self._groups.group(next(self._numbers)), self.rank)


# -- the worker --------------------------------------------------------------------------------------------------------

ATTACHED = 0  # used as a step number
JOIN_SECONDS = 1.0
MOST_REPORTED = 100  # exceptions for a script that catches everything


class JobClosed(BaseException):
    """Ends a script of a closed job. Not an Exception, so that the script's handlers do not catch it."""


class JobGate:
    """Limits the steps of workers; when closed, they end. All waits for a change are here."""

    def __init__(self, moment: Callable[[int], float]) -> None:
        self._moment = moment  # end of a step in virtual seconds
        self.changed = threading.Condition()
        self.last_step, self.last_second = -1.0, 0.0
        self.closed = False

    def allows(self, due: tuple[int, int]) -> bool:
        """Whether a worker may end the steps between two positions."""
        begin, end = due
        return begin < self.last_step and self._moment(end) <= self.last_second

    def open(self, last_step: float, last_second: float) -> None:
        """Let all workers continue up to this limit."""
        with self.changed:
            self.last_step, self.last_second = last_step, last_second
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class VirtualWorker(WorkerScope, ABC):
    """One worker: a thread that runs while it holds the baton. Subclasses add its time, and stop it at the gate."""

    is_virtual = True

    def __init__(
        self, rank: int, script: Path, state: ProcessState, baton: Baton, gate: JobGate, output: TextIO
    ) -> None:
        self.rank, self.steps, self.bytes_sent = rank, 0, 0.0
        self.parts = 0  # backward passes so far, or samples of a recipe with one pass per step
        self.begun = self.attached = self.ended = False
        self.met = False  # whether it has waited for others, so that they must have started
        self._script, self._state, self._baton, self._gate, self._output = script, state, baton, gate, output
        self._reported = 0

    def start(self, world: WorldState, end: Callable[[VirtualWorker, str | None], None]) -> None:
        """Start its script. `end` is called with None, or the failure."""
        self.begun = True
        self._thread = threading.Thread(target=self._work, args=(world, end), name=f"rank {self.rank}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of its thread, so that its memory is freed; only briefly if its script never ends."""
        if self.begun:
            self._thread.join(JOIN_SECONDS)

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether it has ended, or waits at the gate."""

    # -- in its thread -------------------------------------------------------------------------------------------------

    def _work(self, world: WorldState, end: Callable[[VirtualWorker, str | None], None]) -> None:
        worker_scope.enter(self)
        sink.set(self._output)
        place(world)
        failure: str | None = None
        self._await_turn()
        try:
            self._leave_if_closed()
            self._run()
        except JobClosed:
            _leave_sessions()
        except BaseException as error:  # any error of a script ends the job
            failure = _summary(error, self._script)
            _leave_sessions()
        end(self, failure)
        self._end()

    def _await_turn(self) -> None:
        """Wait until this worker may begin, and take the baton."""
        self._baton.take(self._state)

    def _end(self) -> None:
        self._baton.give()
        with self._gate.changed:
            self.ended = True
            self._gate.changed.notify_all()

    def _run(self) -> None:
        code = compile(self._script.read_bytes(), str(self._script), "exec", dont_inherit=True)
        try:
            exec(code, vars(self._state.main))
        except SystemExit as end:
            if end.code:
                raise
        for session in open_sessions():
            session.close()

    @abstractmethod
    def begin_training(self) -> None:
        """The script has attached its model: continue when the gate allows it."""

    @abstractmethod
    def step_ended(self, event: StepEnded) -> None:
        """A step of the session has ended."""

    def change_shares(self, step: int, shares: tuple[int, ...]) -> None:
        """The recipe divides the work in another way after step `step` of the session."""

    @abstractmethod
    def point(self) -> float:
        """The place of a logged value on the time of the job."""

    def _leave_if_closed(self) -> None:
        if not self._gate.closed:
            return
        self._reported += 1
        if self._reported > MOST_REPORTED:  # it catches everything, and would never end
            self._end()
            threading.Event().wait()
        raise JobClosed


def _leave_sessions() -> None:
    """Close sessions as a block `with session` does after an exception: free their memory without the other workers."""
    for session in open_sessions():
        with suppress(Exception, JobClosed):
            session.__exit__(JobClosed, None, None)


def _summary(error: BaseException, script: Path) -> str:
    """An error in one line, with the last line of the script in its traceback."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(script)]
    where = f" ({script.name}, line {lines[-1]})" if lines else ""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}){where}"
    return f"{type(error).__name__}: {error}{where}"
