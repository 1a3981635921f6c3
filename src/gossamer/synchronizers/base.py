"""What a session needs of whatever talks for it: the loop's moments in, what was agreed on out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.reducer.bucket import Bucket

StepCosts = Mapping[str, float]  # by the names of events.StepEnded
NonFiniteOrigin = tuple[int | None, str]
NamedState = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """What an exchange must know of the training loop at the moment it is asked, and whom it tells.

    scale: the factor in the gradients that a GradScaler put there, None without one; settings: the optimizer's
    hyperparameters as text; momentum: its momentum and whether that is Nesterov's, where the compressor applies it;
    buffers: the model's, by module; averaged: those of them that are averaged where parameters are; batch: a hash of
    this rank's first batch; warn: hears everyone's (hash, weight); ended: hears of every step that ended, whether it
    was skipped, and what it took; judged: hears after every exchange whose numbers were not finite and in which tensor
    (no rank where only the agreed mean was not), or None; guarded: hears the same of every backward pass whose
    gradients stay here; clips: whether gradients are clipped in between.
    """

    scale: Callable[[], float | None]
    settings: Callable[[], str]
    momentum: Callable[[], tuple[float, bool]]
    buffers: Callable[[], Sequence[Sequence[Tensor]]]
    averaged: Callable[[], Sequence[Tensor]]
    batch: Callable[[], int]
    warn: Callable[[Sequence[tuple[int, float]]], None]
    ended: Callable[[bool, StepCosts], None]
    judged: Callable[[NonFiniteOrigin | None], None]
    guarded: Callable[[NonFiniteOrigin | None], None]
    clips: bool = False


class Synchronizer(ABC):
    """One way of talking, from one stage of a strategy.

    step: how many steps were made together; passes: how many backward passes all ranks have counted; weight: of this
    rank's batch; muted: backward passes add up and are not counted; asked_to_stop: this rank wants the run to end;
    stopping: all of them know that it ends; until: after so many backward passes another takes its place.
    """

    in_step = True  # whether all ranks come to an epoch's end together

    def __init__(self) -> None:
        self.step, self.weight = 0, 1.0
        self.muted = self.asked_to_stop = self.stopping = False
        self.until: int | None = None
        self.reference: float | None = None  # the weight that counts as one, once it is agreed upon

    @property
    @abstractmethod
    def buckets(self) -> Sequence[Bucket]:
        """What leaves together."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """How many backward passes were counted, where all ranks count alike."""

    @property
    def touched(self) -> bool:
        """Whether anybody wrote to averaged gradients since they were shown."""
        return False

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        """Parameters by name as all workers agree on them; None where that is the model as it is."""
        return None

    def merge(self) -> Mapping[str, Tensor] | None:
        """What `agreed` is, for which some have to ask all others: every rank calls it after the same step."""
        return self.agreed

    def depart(self) -> None:  # noqa: B027 - most have said everything
        """The session ends well on every rank: hear, if the others are there, what all agree on."""

    @abstractmethod
    def before_step(self, *, closure: bool) -> None:
        """The optimizer is about to make its step."""

    @abstractmethod
    def after_step(self) -> None:
        """It has made its step."""

    def rest(self) -> None:  # noqa: B027 - most have nothing to forget
        """What comes next is a new step: the one before is over, or will never be made."""

    @abstractmethod
    def end_epoch(self) -> int:
        """Keep the others company until all have run out of data, or another exchange takes over; how many of their
        steps this rank did not make."""

    @abstractmethod
    def meet_to_save(self) -> None:
        """Find out whether all ranks want to save now. Raises LoopError where they do not."""

    @abstractmethod
    def remembered(self) -> NamedState:
        """{parameter name: {what: tensor}}, as views."""

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """What else must be known to go on exactly from here."""

    @abstractmethod
    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `progress` and `remembered` gave, of as many workers."""

    def begin_at(self, step: int) -> None:
        """Go on after so many steps that somebody made alone."""
        self.step = step

    def restart(self) -> None:  # noqa: B027 - most have nothing but gradients
        """The parameters were overwritten by what all workers agree on."""

    def arrive(self) -> None:  # noqa: B027 - most have nothing under way between two steps
        """Wait for what is under way, and use it now where it must not be lost: on all ranks after the same step."""

    def adopt(self, before: Synchronizer) -> None:
        """Take the place of another of the same stage, whose layout was another."""
        self.follow(before)
        self.step = before.step

    def follow(self, before: Synchronizer) -> None:
        """Go on where another ends."""
        self.weight, self.muted, self.reference = before.weight, before.muted, before.reference
        self.asked_to_stop, self.stopping = before.asked_to_stop, before.stopping

    @abstractmethod
    def close(self) -> None:
        """Leave the model's hooks."""
