"""Rank record: the numbers of one rank over its last session, summed from its event log."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.observe.event_log import SINGLE_STEPS, SUMMED, Entry

Point = tuple[int, float, float | None]
Residual = dict[str, Any]  # {"norm": norm of the residual, "step": after this step}


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The numbers of one rank over one session. Seconds and bytes per step are means unless stated otherwise.

    Times per step exclude the warm-up (warm_up); bytes and totals count every step.
    """

    rank: int
    world: int
    recipe: str
    parameters: int
    steps: int
    skipped_steps: int
    seconds: float  # total
    median_seconds: float  # of a step, over the means of whole periods of the schedule
    p90_seconds: float
    compute_seconds: float
    waiting_seconds: float  # training thread waiting for the communication thread
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    bytes_sent: float
    sessions: int = 1  # that were open at the same time, as of a GAN; steps, seconds and bytes are of all of them
    resumed_at: int = 0  # step of the loaded checkpoint; `steps` counts from the begin of the run
    bytes_pulled: float = 0.0  # from parameter servers
    interface_bytes: float | None = None  # counted by the kernel, of all processes; None without a counter
    residual_bytes: int = 0  # of values that compressors have still to send
    bucket_bytes: int = 0
    peak_resident_bytes: int = 0
    digest: str | None = None  # of the final merged model; None if the session was not closed
    tensors: dict[str, str] = field(default_factory=dict)  # a hash of each tensor of that model, by name
    changed_frozen: list[str] = field(default_factory=list)  # frozen parameters that the script changed
    agrees: bool | None = None  # with ranks on other machines; None if not compared
    differing: dict[str, Any] | None = None  # the differing tensor in the comparison between machines
    holds_merged: bool | None = None  # whether the rank's own model equals the merged one; None as for digest
    metrics: dict[str, list[Point]] = field(default_factory=dict)  # (step, seconds since the session began, value)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)  # (step, directory)
    switches: list[tuple[int, str, str]] = field(default_factory=list)  # (step, the recipe from then on, reason)
    servers: dict[str, Any] | None = None  # final report of the parameter servers
    complete: bool = True  # the process ended successfully, with this session as its last
    left: bool = False  # whether it left a run that continued
    residual: Residual | None = None  # last reported residual, in an elastic run
    lost_residuals: tuple[Residual, ...] = ()  # of earlier starts of this rank that did not finish
    lost: tuple[int, ...] = ()  # ranks that began on this machine and have no complete record
    truncated: tuple[int, ...] = ()  # ranks that ended here without their last lines, since the disk was full
    collectives: dict[str, str] = field(default_factory=dict)  # algorithm by bytes of an all-reduce


def warm_up(steps: int) -> int:
    """Number of first steps excluded from times per step: ten, or a fifth of fewer than fifty."""
    return SINGLE_STEPS if steps >= 5 * SINGLE_STEPS else steps // 5


def by_period(seconds: npt.NDArray[np.float64], period: int) -> npt.NDArray[np.float64]:
    """Means over whole periods of a schedule: with rare sync rounds, most steps have none."""
    whole = len(seconds) - len(seconds) % period
    periods = seconds[:whole].reshape(-1, period) if whole else seconds.reshape(1, -1)
    return np.asarray(periods.mean(axis=1))


@dataclass
class Tally:
    """Running totals of one session, entry by entry."""

    attached: Entry
    seconds: array[float] = field(default_factory=lambda: array("d"))  # of each step
    singles: list[Entry] = field(default_factory=list)  # the first steps, one entry each
    sums: Counter[str] = field(default_factory=Counter)  # over all other steps
    skipped_steps: int = 0
    resumed_at: int = 0
    latest: Entry = field(default_factory=dict)  # latest content of repeated entries
    counted: list[int] = field(default_factory=list)  # by the interface, after the first and the last step
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    switches: list[tuple[int, str, str]] = field(default_factory=list)
    collectives: dict[str, str] = field(default_factory=dict)
    closings: int = 0  # of this session, and of those that began before it and ended after its begin
    ended: bool = False
    failed: bool = False
    left: bool = False

    @property
    def took_part(self) -> bool:
        return bool(self.closings or self.seconds or self.metrics)

    @property
    def is_lost(self) -> bool:
        """Whether its residual is lost because the others continued without it."""
        return self.left or self.failed or not self.closings

    def take(self, entry: Entry) -> None:
        if entry.get("kind") != "tensors":  # a sample of gradients, whose `tensors` are not those of the final model
            self.latest |= entry
        match entry:
            case {"kind": "steps"}:
                self._add(entry)
            case {"kind": "logged", "points": points}:
                for step, seconds, values in points:
                    for name, value in values.items():
                        self.metrics.setdefault(name, []).append((step, seconds, value))
            case {"kind": "saved", "step": step, "directory": directory}:
                self.checkpoints.append((step, directory))
            case {"kind": "switched", "step": step, "after": after, "reason": reason}:
                self.switches.append((step, after, reason))
            case {"kind": "collective", "nbytes": nbytes, "collective": collective}:
                self._pick(str(nbytes), collective)
            case {"kind": "closed"}:
                self.closings += 1
            case {"kind": "end"}:
                self.ended, self.failed = True, entry.get("failed", False)
            case {"kind": "left"}:
                self.left = True

    def _add(self, steps: Entry) -> None:
        if not self.seconds:
            self.resumed_at = max(0, steps["step"] - len(steps["seconds"]))
        if len(self.singles) < SINGLE_STEPS and len(steps["seconds"]) == 1:
            self.singles.append(steps)
        else:
            self.sums.update({name: steps[name] for name in SUMMED})
        self.seconds.extend(steps["seconds"])
        self.skipped_steps += steps["skipped_steps"]
        if "counted" in steps:
            self.counted = [(self.counted or steps["counted"])[0], steps["counted"][1]]

    def _pick(self, nbytes: str, collective: str) -> None:
        """One size may use several algorithms: with different dtypes, or in other groups."""
        before = self.collectives.get(nbytes, "")
        if collective not in before:
            self.collectives[nbytes] = f"{before}, {collective}" if before else collective

    def _mean(self, name: str, first: int = 0) -> float:
        total = sum(single[name] for single in self.singles[first:]) + self.sums[name]
        return float(total / max(len(self.seconds) - first, 1))

    def record(self, *, complete: bool = True) -> RankRecord:
        count = len(self.seconds)
        first = warm_up(count)
        seconds = np.array(self.seconds)[first:]
        waiting = self._mean("waiting_seconds", first)
        latest, between = self.latest, count - 1
        return RankRecord(
            **{name: self.attached[name] for name in ("rank", "world", "recipe", "parameters")},
            steps=latest.get("step", 0),
            sessions=max(1, self.closings),
            resumed_at=self.resumed_at,
            skipped_steps=self.skipped_steps,
            seconds=latest.get("at", 0.0),
            median_seconds=float(np.median(by_period(seconds, self.attached["period"]))) if count else 0.0,
            p90_seconds=float(np.quantile(seconds, 0.9)) if count else 0.0,
            compute_seconds=(float(seconds.mean()) if count else 0.0) - waiting,
            waiting_seconds=waiting,
            encode_seconds=self._mean("encode_seconds", first),
            wire_seconds=self._mean("wire_seconds", first),
            decode_seconds=self._mean("decode_seconds", first),
            bytes_sent=self._mean("bytes_sent"),
            bytes_pulled=self._mean("bytes_pulled"),
            interface_bytes=(self.counted[1] - self.counted[0]) / between if self.counted and between else None,
            peak_resident_bytes=latest.get("peak_resident_bytes", 0),
            residual_bytes=latest.get("residual_bytes", 0),
            bucket_bytes=latest.get("bucket_bytes", 0),
            digest=latest.get("digest"),
            tensors=latest.get("tensors", {}),
            changed_frozen=latest.get("changed_frozen", []),
            agrees=latest.get("agrees"),
            differing=latest.get("differing"),
            holds_merged=latest.get("holds_merged"),
            metrics=self.metrics,
            checkpoints=self.checkpoints,
            switches=self.switches,
            servers=latest.get("told"),
            complete=complete,
            left=self.left,
            residual=latest.get("residual"),
            collectives=self.collectives,
        )


DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of fields that were damaged on disk


def replay(entries: Iterable[Entry]) -> RankRecord | None:
    """The record of the last session that trained; None if no session trained, or if an entry is damaged.

    A worker that was restarted after the others had finished remains lost: its record is not complete.
    """
    try:
        return _replayed(entries)
    except DAMAGED:
        return None


def _replayed(entries: Iterable[Entry]) -> RankRecord | None:
    sessions: list[Tally] = []
    for entry in entries:
        if entry.get("kind") == "attached":
            sessions.append(Tally(entry))
        elif sessions:
            sessions[-1].take(entry)
    taken = [session for session in sessions if session.took_part]
    if not taken:
        return None
    *before, last = taken
    lost = [session.latest["residual"] for session in before if session.is_lost and "residual" in session.latest]
    return replace(
        last.record(complete=last is sessions[-1] and last.ended and not last.failed), lost_residuals=tuple(lost)
    )
