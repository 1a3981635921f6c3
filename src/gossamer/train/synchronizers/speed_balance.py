"""Speed balance: measures the compute time of each worker, and derives its share of the work from all ranks' times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

import torch

from gossamer.algorithms.strategies import GradientStage
from gossamer.algorithms.strategies.shares_by_speed import (
    enough_parts,
    limited_times,
    next_shares,
    next_steps,
    steps_until,
    used_share,
)
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.events import Logged, SharesChanged, emit, notice

WINDOW = 8  # measurements in a median, so that a pause for an evaluation or a checkpoint does not count
WARM_UP = 2  # first measurements, which include compilation and first allocations
REVIEW_STEPS = 8  # steps between changes of the shares
WASTEFUL = 0.8  # of the workers' time; below it a notice proposes smaller parts
now = time.perf_counter


class ComputeClock:
    """Measures this worker's compute time, from the end of a wait for other workers to the beginning of the next one.

    Data loading, forward, backward and the optimizer count; waiting does not. On an accelerator, whose kernels run
    behind the host, events on its stream measure instead, and are read when they have completed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type in ("cpu", "meta")
        self._device = device
        self._began: Any = None
        self._ended: deque[tuple[Any, Any, int]] = deque()
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._measured = 0

    def _mark(self) -> Any:
        if self._on_host:
            return now()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Called at the end of a wait."""
        self._began = self._mark()

    def end(self, parts: int) -> None:
        """Called before the next wait. parts: number of parts of a step computed since `begin`."""
        if self._began is not None and parts > 0:
            self._ended.append((self._began, self._mark(), parts))
        self._began = None

    def drop(self) -> None:
        """Discard the measurement that has begun: the worker has waited since."""
        self._began = None

    @property
    def part_seconds(self) -> float:
        """Median compute time of one part; 0 before enough measurements."""
        while self._ended and (self._on_host or self._ended[0][1].query()):
            began, ended, parts = self._ended.popleft()
            seconds = ended - began if self._on_host else began.elapsed_time(ended) / 1000
            self._measured += 1
            if self._measured > WARM_UP:
                self._times.append(current_worker().compute_seconds(seconds, parts) / parts)
        return median(self._times) if self._times else 0.0


class StepShares:
    """The parts of a step that each rank computes. Equal on all ranks: shares follow from the reports of all ranks.

    Args:
        stage: with `balance`.
        device: of the parameters.
    """

    def __init__(self, stage: GradientStage, device: torch.device) -> None:
        self.clock, self._stage = ComputeClock(device), stage
        self._members: tuple[int, ...] = ()  # for which `_shares` were derived
        self._shares: tuple[int, ...] = ()
        self._warned = False

    def of(self, step: int, members: Sequence[int]) -> tuple[int, ...]:
        """The shares of a step, by rank; equal ones for members whose speeds are not known."""
        return self._shares if self._members == tuple(members) else self._stage.shares(len(members), step)

    def review(self, seconds: Sequence[float], step: int, members: Sequence[int], *, rank: int) -> bool:
        """Derive the next shares; return whether they change. Called on all ranks after the same exchange.

        Args:
            seconds: compute time of a part, by rank, as all ranks reported it.
            step: number of committed steps.
        """
        if step % REVIEW_STEPS or len(seconds) < 2:
            return False
        before = self.of(step, members)
        shares = next_shares(before, seconds)
        if shares == before:
            return False
        self._members, self._shares = tuple(members), shares
        emit(SharesChanged(step=step, shares=shares))
        emit(Logged(step=step, values={"share": shares[rank] / sum(shares)}))
        if rank == 0 and not self._warned:
            self._warn(shares, seconds)
        return True

    def _warn(self, shares: Sequence[int], seconds: Sequence[float]) -> None:
        self._warned = True
        batch, used = self._stage.batch, used_share(shares, seconds)
        text = f"shares of a step now follow the workers' speeds: ranks compute {', '.join(map(str, shares))} "
        part, parts = ("sample", "samples") if self._stage.in_one_pass else ("pass", f"passes of {batch} samples")
        text += parts
        if used < WASTEFUL:
            count = enough_parts(seconds, sum(shares))
            text += (
                f". They still wait for {1 - used:.0%} of the time, because one {part} on the slowest rank takes as "
                f"long as {max(seconds) / min(seconds):.1f} on the fastest. Write global_batch={count * batch}, or a "
                "smaller batch"
            )
        notice(text)

    def progress(self) -> Mapping[str, Any]:
        return {"members": list(self._members), "shares": list(self._shares)}

    def resume(self, progress: Mapping[str, Any]) -> None:
        self._members, self._shares = tuple(progress["members"]), tuple(progress["shares"])


class LocalPace:
    """The local steps of this worker per period, in proportion to its speed.

    A worker with n of `period` local steps moves along the common schedule by period / n per step, rounded down, so it
    is at the same position as the others at the end of a period. n changes only there, and not for noise.

    period 6, speeds 1 and 1/2      positions of the first worker 1 2 3 4 5 6, of the second 2 4 6

    Args:
        period: local steps of the fastest worker.
        start: position at which the schedule begins.
        device: of the parameters.
    """

    def __init__(self, period: int, start: int, device: torch.device) -> None:
        self.clock, self._period, self._start = ComputeClock(device), period, start
        self._steps = self._next = period  # local steps of this period and of the next one
        self._members: tuple[int, ...] = ()  # for which `shares` were derived
        self.shares: tuple[int, ...] = ()  # local steps of the next period, by rank; equal on all ranks
        self._warned = False

    def advance(self, position: int) -> int:
        """Return the position in the common schedule after one more local step."""
        within = (position - self._start) % self._period
        if not within:
            self._steps = self._next
        made = steps_until(within, self._steps, self._period)
        self.clock.end(1)
        self.clock.begin()
        return position - within + (made + 1) * self._period // self._steps

    def adapt(self, seconds: Sequence[float], members: Sequence[int], *, rank: int, position: int = 0) -> bool:
        """Choose the steps of the next period; return whether shares changed. On all ranks after the same round.

        Args:
            seconds: compute time of a local step, by rank; 0 where unknown.
            members: numbers of the workers, by rank.
            rank: of this worker.
            position: in the common schedule.
        """
        if len(seconds) != len(members):
            return False
        before = self.shares if self._members == tuple(members) else (self._period,) * len(members)
        shares, limited = next_steps(before, seconds, self._period), limited_times(seconds)
        if limited is not None and self._period * min(limited) < WASTEFUL * max(limited):  # for one step per period
            self._warn(limited, rank)
        self._members, self.shares, self._next = tuple(members), shares, shares[rank]
        if shares == before:
            return False
        period_end = position + (self._start - position) % self._period
        emit(SharesChanged(step=period_end, shares=shares))
        emit(Logged(step=position, values={"local_steps": shares[rank]}))
        return True

    def _warn(self, seconds: Sequence[float], rank: int) -> None:
        if rank or self._warned:
            return
        self._warned = True
        times = max(seconds) / min(seconds)
        notice(
            f"the slowest rank needs as long for one local step as the fastest for {times:.1f}, so the others wait in "
            f"every round of {self._period}. Write period={ceil(times)} or more"
        )

    def progress(self) -> Mapping[str, Any]:
        """State for a checkpoint."""
        shares = {"members": list(self._members), "shares": list(self.shares)}
        return {"steps": self._steps, "next": self._next, **shares}

    def resume(self, progress: Mapping[str, Any] | None) -> None:
        """Continue from `progress`; None on a new worker, whose speed is unknown."""
        if progress is None:
            self._steps = self._next = self._period
            self._members = self.shares = ()
            return
        self._steps, self._next = progress["steps"], progress["next"]
        self._members, self.shares = tuple(progress["members"]), tuple(progress["shares"])
