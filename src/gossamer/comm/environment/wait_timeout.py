"""Wait timeout: how long a worker waits for the others, by init's argument or GOSSAMER_TIMEOUT, usually 30 minutes."""

from __future__ import annotations

import os
from datetime import timedelta
from math import inf

VARIABLE = "GOSSAMER_TIMEOUT"
USUAL_SECONDS = 1800.0  # as torch's process groups over Gloo
COORDINATOR_SECONDS = 600.0  # for its machine to start again
LONGEST = timedelta(days=3650)  # that torch is told, which has no "for ever"


def timeout_seconds() -> float:
    """As long as GOSSAMER_TIMEOUT says, in seconds ("inf": for ever), or the usual time. Raises ValueError."""
    text = os.environ.get(VARIABLE) or str(USUAL_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"{VARIABLE}={text}: that is no number of seconds above 0, so nobody knows how long a worker waits "
            f"for one that says nothing. Write {VARIABLE}=3600 for an hour, or leave it unset."
        )
    return seconds


def coordinator_seconds() -> float:
    """How long workers of an elastic run wait for a coordinator that does not answer: GOSSAMER_TIMEOUT where it is set,
    else ten minutes. Raises ValueError."""
    return timeout_seconds() if os.environ.get(VARIABLE) else COORDINATOR_SECONDS


def set_timeout(timeout: timedelta) -> None:
    """Wait so long from now on, in this process and those that it starts. Raises TypeError and ValueError."""
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r} has no unit: seconds to one reader, minutes to the next. Write it as for "
            "torch.distributed.init_process_group: from datetime import timedelta; "
            "gossamer.init(timeout=timedelta(minutes=30))"
        )
    if timeout <= timedelta(0):
        raise ValueError(
            f"timeout={timeout!r} is no time in which anybody could come. Write how long to wait at most for the other "
            f"workers: gossamer.init(timeout=timedelta(minutes=30)); for ever is {VARIABLE}=inf"
        )
    os.environ[VARIABLE] = f"{timeout.total_seconds():.15g}" if timeout < LONGEST else "inf"


def engine_timeout() -> timedelta | None:
    """The same for torch's process groups; None, for what they usually have, where nobody asked for another."""
    if not os.environ.get(VARIABLE):
        return None
    seconds = timeout_seconds()
    return LONGEST if seconds >= LONGEST.total_seconds() else timedelta(seconds=seconds)


def waiting_for(seconds: float) -> str:
    """How long a wait may last, and what says so."""
    for_how_long = "for ever" if seconds == inf else f"for {duration(seconds)} at most"
    return f"{for_how_long} ({VARIABLE}={seconds:.15g})"


def duration(seconds: float) -> str:
    """As people say it: `40 s`, `12 min`, `1.5 h`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
