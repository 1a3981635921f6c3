"""One copy of a script that is measured: how its steps pass, and how fast its gradients are compressed.

`python -m gossamer.probe DIRECTORY COPY COPIES WORKERS SCRIPT ARGS...` leaves its numbers in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gossamer.buckets import Bucket, Buffers, divide, trainable
from gossamer.compressors import Compressor
from gossamer.control import NOBODY, Presence, Report, control_bytes
from gossamer.forecast import STEADY, as_main
from gossamer.foretell import Measured, MeasuredBucket
from gossamer.recipe import resolve
from gossamer.rounds import Closing, Fresh, Round
from gossamer.session import Session, open_sessions
from gossamer.transports.simulated import mean_of, meta_answer
from gossamer.words import At, Exchange, Gather, Mean, Payload, Together, Word

WARM_UP_STEPS = 3
STEPS = 6
EXCHANGES = 4  # the first is not counted


def results(directory: Path, copies: int) -> list[Path]:
    return [directory / f"measured-{copy}.json" for copy in range(copies)]


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [float(value) for value in np.median(rows, axis=0)]


# -- codecs: the real exchange, with everyone else saying the same at once ---------------------------------------------


class _Echo:
    """A transport on which all ranks say what this one says; keeps when it was asked and when it had answered.

    Who was sent a part in an exchange tells of that part in the gather after it: as if what it was sent.
    """

    rank = 0

    def __init__(self, world: int) -> None:
        self.world = world
        self.moments: list[float] = []
        self._parts: tuple[Payload, ...] = ()

    def answer(self, word: Word) -> Any:
        self.moments.append(time.perf_counter())
        answer = self._answer(word)
        self.moments.append(time.perf_counter())
        return answer

    def _answer(self, word: Word) -> Any:
        match word:
            case Mean(tensor, out):
                mean = mean_of([tensor] * self.world)
                return mean if out is None else out.copy_(mean)
            case Together(words):
                return [self._answer(each) for each in words]
            case Gather(payload) if self._parts and _shapes(payload) == _shapes(self._parts[self.rank]):
                return list(self._parts)
            case Exchange(parts):
                self._parts = parts
                return meta_answer(word, self.world, self.rank)
            case _:
                return meta_answer(word, self.world, self.rank)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """They are alike."""

    def gather_text(self, text: str) -> list[str]:
        return [text] * self.world

    def part(self, size: int) -> _Echo:
        return _Echo(size)

    def close(self) -> None:
        """There is nobody to leave."""


def _shapes(payload: Payload) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in payload]


def exchange(
    buckets: Sequence[Bucket], compressor: Compressor, workers: int, fresh: Mapping[str, Tensor]
) -> list[tuple[list[float], list[float]]]:
    """Exchange `fresh` gradients once: each bucket's seconds of computing (one more than words) and within words."""
    echo = _Echo(workers)
    names = [name for bucket in buckets for name in bucket.parameters]
    round_ = Round(compressor, echo, names, At(step=STEADY, world=workers), reference=1.0, weight=1.0)
    found = []
    for bucket in buckets:
        pairs = Fresh([(view, fresh[name]) for name, view in bucket.views.items()])
        echo.moments = [time.perf_counter()]
        if bucket is buckets[-1]:
            round_.close(bucket, pairs, 1.0, _closing(len(names)))
        else:
            round_.exchange(bucket, pairs, 1.0)
        seconds = np.diff([*echo.moments, time.perf_counter()]).tolist()
        bucket.state = round_.staged[-1].next_state.after(bucket.state)
        found.append((seconds[::2], seconds[1::2]))
    return found


def _closing(parameters: int) -> Closing:
    report = Report(
        weight=1.0,
        presence=Presence.TRAINING,
        settings=0,
        culprit=NOBODY,
        used=np.ones(parameters, dtype=bool),
        moved=np.zeros(0, dtype=bool),
    )
    return Closing(report=report, settings="", buffers=())


# -- one copy ----------------------------------------------------------------------------------------------------------


class _Done(BaseException):
    """Ends a script that has been measured. Not an Exception, so that its own handlers let it pass."""


@dataclass(frozen=True)
class _Meeting:
    """Copies tell each other how far they are: by files. Whoever waits goes on training, so that all stay busy."""

    directory: Path
    copy: int
    copies: int

    def arrive(self, stage: str) -> None:
        (self.directory / f"{stage}-{self.copy}").touch()

    def all_at(self, stage: str) -> bool:
        return all((self.directory / f"{stage}-{copy}").exists() for copy in range(self.copies))


@dataclass
class _Times:
    """The moments of one step."""

    begin: float
    ready: list[float]
    backward: float = 0.0
    end: float = 0.0


@dataclass
class _Probe:
    """Watches a session's steps from outside, and ends the script when it has seen enough."""

    meeting: _Meeting
    workers: int
    asker: int = field(default_factory=os.getppid)
    session: Session | None = None
    buckets: list[Bucket] = field(default_factory=list)
    steps: int = 0
    kept: list[_Times] = field(default_factory=list)
    now: _Times | None = None

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        session = next((each for each in open_sessions() if each.optimizer is optimizer), None)
        if session is None:
            return
        if os.getppid() != self.asker:
            raise _Done  # nobody is left to read what would be found
        if self.session is None:
            self._watch(session)
        _synchronise()
        moment = time.perf_counter()
        self._count(moment)
        if len(self.kept) >= STEPS:
            self.meeting.arrive("steps")
            if self.meeting.all_at("steps"):
                self._finish(session)
        self.now = _Times(time.perf_counter(), [0.0] * len(self.buckets))

    def _watch(self, session: Session) -> None:
        self.session = session
        compressor = session.recipe.compressor
        at = At(step=STEADY, world=self.workers)
        self.buckets = [Bucket(part, compressor, at) for part in divide(trainable(session.model))]
        for place, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters.values():
                parameter.register_post_accumulate_grad_hook(partial(self._ready, place))

    def _ready(self, place: int, parameter: Tensor) -> None:
        if self.now is None:
            return
        if not any(self.now.ready):
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        self.now.ready[place] = time.perf_counter()

    def _backward_ended(self) -> None:
        if self.now is not None:
            self.now.backward = time.perf_counter()

    def _count(self, moment: float) -> None:
        if self.now is None:
            return
        self.steps += 1
        if self.steps >= WARM_UP_STEPS:
            self.meeting.arrive("warm")
        if self.steps > WARM_UP_STEPS and self.now.backward and self.meeting.all_at("warm") and len(self.kept) < STEPS:
            self.now.end = moment
            self.kept.append(self.now)

    def _finish(self, session: Session) -> None:
        """Measure the codecs with the gradients that are here, next to copies that do the same."""
        fresh = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for bucket in self.buckets
            for name, parameter in bucket.parameters.items()
        }
        compressor, found = session.recipe.compressor, list[Any]()
        while len(found) < EXCHANGES or not self.meeting.all_at("codecs"):
            found.append(exchange(self.buckets, compressor, self.workers, fresh))
            if len(found) == EXCHANGES:
                self.meeting.arrive("codecs")
        measured = self._measured(session, found[1:EXCHANGES])
        path = results(self.meeting.directory, self.meeting.copies)[self.meeting.copy]
        path.write_text(json.dumps(measured.to_json()))
        raise _Done

    def _measured(self, session: Session, found: Sequence[Any]) -> Measured:
        buckets = [
            MeasuredBucket(
                dtype=str(bucket.flat.dtype).removeprefix("torch."),
                shapes={slot.name: slot.shape for slot in bucket.layout},
                ready_seconds=median(max(step.ready[: place + 1]) - step.begin for step in self.kept),
                computing_seconds=medians([each[place][0] for each in found]),
                engine_seconds=medians([each[place][1] for each in found]),
            )
            for place, bucket in enumerate(self.buckets)
        ]
        busy = self.meeting.copies * torch.get_num_threads()
        return Measured(
            recipe=repr(session.recipe),
            backward_seconds=median(step.backward - step.begin for step in self.kept),
            rest_seconds=median(step.end - step.backward for step in self.kept),
            buckets=buckets,
            control_bytes=control_bytes(len(trainable(session.model)), len(Buffers(session.model))),
            buffer_bytes=_moving_buffers(session.model),
            crowded=not self.buckets[0].flat.is_cuda and busy >= (os.cpu_count() or 1),
            copies=self.meeting.copies,
        )


def _moving_buffers(model: nn.Module) -> list[int]:
    """Bytes of each buffer that training moves in every step."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer.nbytes for norm in norms for buffer in norm.buffers(recurse=False)]


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    directory, copy, copies, workers, script, *arguments = sys.argv[1:]
    meeting = _Meeting(Path(directory), int(copy), int(copies))
    register_optimizer_step_post_hook(_Probe(meeting, int(workers)).after_step)
    try:
        with as_main(Path(script), arguments, resolve(os.environ["GOSSAMER_RECIPE"])):
            runpy.run_path(script, run_name="__main__")
    except _Done:
        pass
    finally:
        for stage in ("warm", "steps", "codecs"):  # nobody waits for a copy that has ended
            meeting.arrive(stage)


if __name__ == "__main__":
    main()
