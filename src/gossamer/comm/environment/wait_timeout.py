"""Wait timeout: how long a worker waits for others, set by argument or GOSSAMER_TIMEOUT; 30 minutes by default."""

from __future__ import annotations

import os
from datetime import timedelta
from math import inf

from gossamer.errors import GossamerError

VARIABLE = "GOSSAMER_TIMEOUT"
USUAL_SECONDS = 1800.0  # like torch's process groups over Gloo
COORDINATOR_SECONDS = 600.0  # enough for its machine to reboot
LONGEST = timedelta(days=3650)  # passed to torch for an infinite timeout


class TimeoutVariableError(GossamerError, ValueError):
    """GOSSAMER_TIMEOUT is not a number of seconds above 0."""


def timeout_seconds() -> float:
    """Return GOSSAMER_TIMEOUT in seconds ("inf": no limit), or the default of 30 minutes. Raises
    TimeoutVariableError."""
    text = os.environ.get(VARIABLE) or str(USUAL_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise TimeoutVariableError(
            f"{VARIABLE}={text} is not a number of seconds above 0. It limits how long a worker waits "
            f"for a silent one. Write {VARIABLE}=3600 for an hour, or leave it unset."
        )
    return seconds


def coordinator_seconds() -> float:
    """Return how long workers of an elastic run wait for a silent coordinator: GOSSAMER_TIMEOUT if set, else ten
    minutes. Raises TimeoutVariableError."""
    return timeout_seconds() if os.environ.get(VARIABLE) else COORDINATOR_SECONDS


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout in this process and its future children. Raises TypeError and ValueError."""
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r} has no unit. Pass a timedelta, as for "
            "torch.distributed.init_process_group: from datetime import timedelta; "
            "gossamer.init(timeout=timedelta(minutes=30))"
        )
    if timeout <= timedelta(0):
        raise ValueError(
            f"timeout must be positive, got {timeout!r}. Example: gossamer.init(timeout=timedelta(minutes=30)). "
            f"To wait without a limit, set {VARIABLE}=inf"
        )
    os.environ[VARIABLE] = f"{timeout.total_seconds():.15g}" if timeout < LONGEST else "inf"


def engine_timeout() -> timedelta | None:
    """Return the timeout for torch's process groups; None, for torch's default, if none was set."""
    if not os.environ.get(VARIABLE):
        return None
    seconds = timeout_seconds()
    return LONGEST if seconds >= LONGEST.total_seconds() else timedelta(seconds=seconds)


def waiting_for(seconds: float) -> str:
    """Describe how long a wait may last, and the variable that sets it."""
    for_how_long = "without a limit" if seconds == inf else f"for {duration(seconds)} at most"
    return f"{for_how_long} ({VARIABLE}={seconds:.15g})"


def duration(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `1.5 h`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
