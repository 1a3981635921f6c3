"""Failures: finds the root cause among all failures of a run."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gossamer.base import system
from gossamer.errors import PeerLost

# Messages of Gloo and NCCL when another process ended; they raise no specific error class
ECHOES = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


class Origin(IntEnum):
    """Origin of a failure, in order of likelihood of being the root cause."""

    KILLED = 0  # by a fatal signal such as SIGKILL or SIGSEGV, or by a request to end such as SIGTERM
    RAISED = 1  # an exception of the script
    ENDED = 2  # sys.exit, or an exit code without a report
    ECHO = 3  # an error that only reports the loss of another worker
    STOPPED = 4  # by the launcher, because another worker failed


FAULTS = {*system.signals("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")}
REQUESTS = {*system.signals("SIGTERM", "SIGINT", "SIGHUP")}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one worker."""

    rank: int
    exit_code: int  # negative for a signal's number
    moment: float  # in seconds since the epoch
    origin: Origin
    summary: str = ""  # last line of the error
    traceback: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would report."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code or 1

    @property
    def ending(self) -> str:
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        return f"signal {_signal_name(-self.exit_code)}"

    @property
    def is_final(self) -> bool:
        """Whether a restart cannot help: the worker differs from the others, or the coordinator did not return."""
        return self.summary.startswith(("gossamer.errors.MismatchError", "gossamer.errors.CoordinatorLost"))

    def __str__(self) -> str:
        if self.origin is Origin.STOPPED:
            return f"rank {self.rank} was stopped ({self.ending})"
        if self.summary:
            return f"rank {self.rank} failed: {self.summary} ({self.ending})"
        return f"rank {self.rank} failed: it ended with {self.ending}{_HINTS.get(-self.exit_code, '')}"


_HINTS = {
    int(system.KILL): ". It was killed from outside; on Linux most often because memory ran out: see `dmesg`",
    int(signal.SIGTERM): ". It alone received a request to end: from a scheduler, a container's limit, or `kill`. To "
    "stop the run, send the signal to the launcher",
    int(signal.SIGSEGV): ". Native code crashed: `python -X faulthandler` shows where",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def is_echo(error: BaseException) -> bool:
    """Whether an error only reports the loss of another worker."""
    if isinstance(error, PeerLost | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(echo in str(error).lower() for echo in ECHOES)


def from_report(report: Mapping[str, Any]) -> Failure:
    """The failure that a worker reported."""
    return Failure(
        rank=report["rank"],
        exit_code=report["exit_code"],
        moment=report["moment"],
        origin=Origin[report["origin"]],
        summary=report["summary"],
        traceback=report["traceback"],
    )


def from_exit(rank: int, exit_code: int, moment: float, stopped: bool) -> Failure:
    """The failure of a worker without a failure report. stopped: whether the launcher was ending all workers, because
    of another failure or a request."""
    origin = Origin.ENDED
    if stopped:
        origin = Origin.STOPPED
    elif -exit_code in FAULTS | REQUESTS:
        origin = Origin.KILLED
    return Failure(rank=rank, exit_code=exit_code, moment=moment, origin=origin)


def cause(failures: Iterable[Failure]) -> Failure:
    return min(failures, key=lambda failure: (failure.origin, failure.moment, failure.rank))


LOOK_SECONDS = 0.05  # between reads of the workers' output
RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may start the same command again


@dataclass(frozen=True)
class Outcome:
    """The end of a run: success, a failure, a signal to the launcher, or too few workers."""

    failure: Failure | None = None
    signal: int | None = None  # its number
    restarts: int = 0
    resumable: str = ""  # why it ended without a failure; the same command may continue it

    @property
    def exit_code(self) -> int:
        if self.signal is not None:
            return 128 + self.signal
        if self.resumable:
            return RESUMABLE
        return self.failure.shell_code if self.failure else 0
