"""Operator profile: torch.profiler around the steps that are traced, on the ranks that were chosen for it.

Its file lies beside the spans and has their name. A mark in it says what this process's own clock showed, which is how
the operators come onto the clock of all ranks.
"""

from __future__ import annotations

import logging
import os
import re
import time

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gossamer.base.spans.record_format import CLOCK_MARK, OPERATORS_SUFFIX
from gossamer.base.spans.recorder import SpanRecorder

PROFILED = "GOSSAMER_TORCH_PROFILER"
MOST_PASSES = 50  # forward passes: each has thousands of operators, which wait in memory until the last one
MARKS = 5  # of the clock, of which the promptest counts
_RANKS = re.compile(r"[0-9]+(,[0-9]+)*")


def read_ranks(text: str) -> frozenset[int] | None:
    """As 0,2; None for all. Raises ValueError with the line to write."""
    if text == "all":
        return None
    if not _RANKS.fullmatch(text):
        raise ValueError(f'"{text}" names no ranks: write them with commas, such as 0,2, or "all"')
    return frozenset(map(int, text.split(",")))


def profile_as_told(recorder: SpanRecorder) -> None:
    """Where the environment chooses this rank. Raises ValueError."""
    text = os.environ.get(PROFILED)
    if text and recorder.follow is None:
        ranks = read_ranks(text)
        if ranks is None or recorder.rank in ranks:
            recorder.follow = OperatorProfile(recorder)


class OperatorProfile:
    """Called before each forward pass with whether it is recorded, by the thread that trains.

    Not in hooks of the optimizer: torch wraps its step into a record_function, and a profiler that stops within one
    crashes the process.
    """

    def __init__(self, recorder: SpanRecorder) -> None:
        self._path = recorder.path.with_suffix(OPERATORS_SUFFIX)
        self._profile: profile | None = None
        self._left = MOST_PASSES

    def __call__(self, recording: bool) -> None:
        try:
            if recording and self._profile is None and self._left:
                self._begin()
            elif self._profile is not None:
                self._left -= 1
                if not recording or not self._left:
                    self._end(self._profile, full=recording)
        except (OSError, RuntimeError, AssertionError) as error:  # as where the script runs a profiler of its own
            self._profile, self._left = None, 0
            _tell("operators are not profiled (%s). Training goes on.", str(error).split("\n")[0])

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        begun = profile(activities=kinds)
        begun.start()
        self._profile = begun
        for _ in range(MARKS):
            with record_function(f"{CLOCK_MARK}{time.perf_counter():.9f}"):
                pass

    def _end(self, ended: profile, *, full: bool) -> None:
        self._profile = None
        ended.stop()
        if not self._path.exists():
            ended.export_chrome_trace(str(self._path))
        if full:
            _tell("operators of %d forward passes are in %s, and no more are profiled.", MOST_PASSES, self._path.name)


def _tell(text: str, *about: object) -> None:
    logging.getLogger("gossamer").warning(text, *about)
