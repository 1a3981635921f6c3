"""Startup: progress of this machine's workers until the first step, for the launcher's line."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from gossamer.base.run_files import RunFiles, Stage, write_json
from gossamer.events import Attached, Event, Joined, LeftRun, ResidualMeasured, WithoutSession
from gossamer.launcher.job import Job

REACHED = {
    Stage.ENTERED: "{reached} of {count} imported torch",
    Stage.JOINED: "{script} runs, {reached} of {count} joined (gossamer.init)",
    Stage.ATTACHED: "all joined, {reached} of {count} attached (gossamer.attach)",
}
BY_EVENT: dict[type[Event], Stage] = {Joined: Stage.JOINED, Attached: Stage.ATTACHED, LeftRun: Stage.LEFT}


class StageMarks:
    """Listener of a worker's events: marks each stage, and the residual that would be lost with the worker, for its
    launcher."""

    def __init__(self, files: RunFiles, rank: int, attempt: int) -> None:
        self._files, self._rank, self._attempt = files, rank, attempt

    def __call__(self, event: Event) -> None:
        with suppress(OSError):  # a full disk must not end training
            self._report(event)

    def _report(self, event: Event) -> None:
        if (stage := BY_EVENT.get(type(event))) is not None:
            self._files.mark(stage, self._rank, self._attempt)
        elif isinstance(event, WithoutSession):
            self._files.mark(Stage.OTHERWISE if event.trains else Stage.CALLED, self._rank, self._attempt)
        elif isinstance(event, ResidualMeasured):
            path = self._files.residual(self._rank, self._attempt)
            write_json(path, {"norm": event.norm, "step": event.step})


class Startup:
    """One line until the first step: how many workers have reached which stage."""

    def __init__(self, job: Job, files: RunFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._files = job, files
        self._clock, self._began = clock, clock()

    def __str__(self) -> str:
        count = self._job.workers
        workers = f"{count} worker{'s' * (count > 1)}"
        waited = f"{self._clock() - self._began:.0f} s"
        if self._job.nodes > 1 and not any(self._files.newest_start(rank) for rank in self._job.local_ranks):
            return f"waiting for the other machines · {waited}"
        if self._any_is(Stage.OTHERWISE) and not self._any_is(Stage.ATTACHED):
            return f"{workers} joined, without a session (gossamer.attach) so far · {waited}"
        for stage, text in REACHED.items():
            reached = sum(self._files.has_reached(stage, rank) for rank in self._job.local_ranks)
            if reached < count:
                where = text.format(reached=reached, count=count, script=self._job.name or self._job.script.name)
                return f"starting {workers} · {where} · {waited}"
        return f"{workers} attached, before the first step · {waited}"

    def _any_is(self, stage: Stage) -> bool:
        return any(self._files.has_reached(stage, rank) for rank in self._job.local_ranks)
