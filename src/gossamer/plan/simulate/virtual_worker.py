"""Virtual worker: runs a user's script in a thread, as one of several workers of a process, in a world of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from gossamer.plan.simulate.clock import JobClock
from gossamer.plan.simulate.shared_process import Baton, ProcessState, sink
from gossamer.train.world_state import WorldState, place

# -- its world ---------------------------------------------------------------------------------------------------------


class VirtualGroups:
    """The groups of one simulated job, in the order in which its workers ask for them."""

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
        """This rank's script is over: whoever waits for it, or will, is told."""
        with self._lock:
            self._closed.add(rank)
            for group in self._groups:
                group.close(rank)

    def leave(self) -> None:
        """Break all of them: nobody waits any more."""
        with self._lock:
            self._broken = True
            for group in self._groups:
                group.leave()


class VirtualTransport(SimulatedTransport):
    """One worker's end of a group, where texts take time, too."""

    def all_gather_text(self, text: str) -> list[str]:
        heard = super().all_gather_text(text)
        current_worker().exchanged()
        return heard


class VirtualWorld(WorldState):
    """One worker's world. On the processor: gradients of a GPU are complete in threads that all workers share."""

    def __init__(self, rank: int, groups: VirtualGroups) -> None:
        super().__init__(rank=rank, size=groups.workers, local_rank=rank, device=torch.device("cpu"))
        self._groups, self._numbers = groups, count()

    def own_transport(self) -> Transport:
        """This worker's end of the job's next group."""
        return VirtualTransport(self._groups.group(next(self._numbers)), self.rank)


# -- the worker --------------------------------------------------------------------------------------------------------

JOIN_SECONDS = 1.0
MOST_TOLD = 100  # times that a script which catches everything is told to end


class JobClosed(BaseException):
    """Ends a script whose job is closed. Not an Exception, so that its own handlers let it pass."""


class JobGate:
    """Says which step workers may go on to; closed, they end. Everybody who waits for a change waits here."""

    def __init__(self, moment: Callable[[int], float]) -> None:
        self._moment = moment  # of a step's end, in virtual seconds
        self.changed = threading.Condition()
        self.last_step, self.last_second = -1.0, 0.0
        self.closed = False

    def allows(self, step: int) -> bool:
        return step <= self.last_step and self._moment(step) <= self.last_second

    def open(self, last_step: float, last_second: float) -> None:
        """Let all go on as far as this."""
        with self.changed:
            self.last_step, self.last_second = last_step, last_second
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class VirtualWorker(WorkerScope):
    """One worker: a thread that runs while it holds the baton, and stops where the gate does not let it go on."""

    def __init__(
        self, rank: int, script: Path, state: ProcessState, baton: Baton, gate: JobGate, clock: JobClock, output: TextIO
    ) -> None:
        self.rank, self.steps, self.bytes_sent = rank, 0, 0.0
        self._clock, self._timed = clock, 0  # steps whose costs it was told
        self._exchanges, self._since = 0, 0.0  # so far, and the seconds of those since its last step
        self.due: int | None = None  # the step that it is about to make, where it asks whether it may
        self.begun = self.attached = self.ended = False
        self.met = False  # whether it has waited for others, who therefore have to be there
        self._script, self._state, self._baton, self._gate, self._output = script, state, baton, gate, output
        self._told = 0

    def start(self, world: WorldState, end: Callable[[VirtualWorker, str | None], None]) -> None:
        """Begin its script. `end` is told how that ended: None, or what failed."""
        self.begun = True
        self._thread = threading.Thread(target=self._work, args=(world, end), name=f"rank {self.rank}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until its thread is gone, and what it held with it; for a moment, where its script never ends."""
        if self.begun:
            self._thread.join(JOIN_SECONDS)

    @property
    def settled(self) -> bool:
        """Whether it has ended, or waits at the gate."""
        waits = not self._gate.closed and self.due is not None and not self._gate.allows(self.due)
        return self.ended or waits

    # -- in its thread -------------------------------------------------------------------------------------------------

    def _work(self, world: WorldState, end: Callable[[VirtualWorker, str | None], None]) -> None:
        worker_scope.enter(self)
        sink.set(self._output)
        place(world)
        failure: str | None = None
        self._baton.take(self._state)
        try:
            self._leave_if_closed()
            self._run()
        except JobClosed:
            _leave_sessions()
        except BaseException as error:  # whatever a script raises ends the job
            failure = _summary(error, self._script)
            _leave_sessions()
        end(self, failure)
        self._end()

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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if threading.current_thread() is not self._thread:  # a communication thread needs no baton
            yield
            return
        self._meet_others()
        self._baton.give()
        try:
            yield
        finally:
            self._baton.take(self._state)
            self._leave_if_closed()

    def now(self) -> float:
        return self._clock.moment(self._timed) + self._since

    def step_costs(self, measured: Mapping[str, float]) -> Mapping[str, float]:
        """Those of a foretold step; its bytes are real."""
        self._timed, self._since = self._timed + 1, 0.0
        times = self._clock.times(self._timed)
        foretold = {
            "waiting_seconds": times.waiting_seconds,
            "encode_seconds": times.codec_seconds,
            "wire_seconds": times.wire_seconds,
            "decode_seconds": 0.0,
        }
        return {**measured, **foretold}

    def exchanged(self) -> None:
        """All workers have told each other a short text. Before training that takes no time."""
        if self._timed:
            self._since += self._clock.exchange(self._exchanges)
            self._exchanges += 1

    def _meet_others(self) -> None:
        if not self.met:
            with self._gate.changed:
                self.met = True
                self._gate.changed.notify_all()

    def ask(self, step: int) -> None:
        """Go on to this step, now or once the gate lets it."""
        with self._gate.changed:
            self.due = step
            allowed = self._gate.allows(step)
            if not allowed:
                self._gate.changed.notify_all()
        if not allowed:
            with self.waiting(), self._gate.changed:
                self._gate.changed.wait_for(lambda: self._gate.closed or self._gate.allows(step))
        self._leave_if_closed()
        self.due = None

    def _leave_if_closed(self) -> None:
        if not self._gate.closed:
            return
        self._told += 1
        if self._told > MOST_TOLD:  # it catches everything, and would go on for ever
            self._end()
            threading.Event().wait()
        raise JobClosed


def _leave_sessions() -> None:
    """As a block `with session` is left by an exception: they hold nothing any more, and the others are not asked."""
    for session in open_sessions():
        with suppress(Exception, JobClosed):
            session.__exit__(JobClosed, None, None)


def _summary(error: BaseException, script: Path) -> str:
    """An error in one line, with the last line of the script that it passed."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(script)]
    where = f" ({script.name}, line {lines[-1]})" if lines else ""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}){where}"
    return f"{type(error).__name__}: {error}{where}"
