"""The recorder of this process: None while nothing is recorded, so that each seam costs one test."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from gossamer.base import system
from gossamer.base.spans.recorder import SpanRecorder
from gossamer.base.spans.step_range import StepRange, read_steps

TRACE, STEPS = "GOSSAMER_TRACE", "GOSSAMER_TRACE_STEPS"

recorder: SpanRecorder | None = None


def begin(folder: Path, rank: int, world: int, steps: StepRange | None = None) -> SpanRecorder:
    """Record from now on, into a file of this process in `folder`. Raises OSError where nothing can be written."""
    global recorder
    end()
    recorder = SpanRecorder(folder, rank, world, steps or StepRange())
    return recorder


def begin_from_environment(rank: int, world: int) -> None:
    """Start recording by the environment variables of `gossamer run --trace`, once per process.

    Raises OSError and ValueError.
    """
    folder = os.environ.get(TRACE)
    if folder and recorder is None:
        begin(Path(folder), rank, world, read_steps(os.environ.get(STEPS) or "all"))
        atexit.register(end)


def end() -> None:
    """Write the recorded spans, and stop recording."""
    global recorder
    before, recorder = recorder, None
    if before is not None:
        before.close()


def _forget() -> None:
    """A forked child writes nothing into its parent's file."""
    global recorder
    recorder = None


system.after_fork_in_child(_forget)
