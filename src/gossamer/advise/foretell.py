"""Foretelling: seconds, bytes and memory of every candidate's step on a network, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer.advise.candidates import Candidate
from gossamer.advise.step_pricing import StepPricer
from gossamer.estimate.workload_profile import WorkloadProfile
from gossamer.network import Network


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """What is expected of a recipe. Seconds and bytes are of one step of the optimizer, on average over a period."""

    recipe: str  # as one would write it
    step_seconds: float = 0.0
    bytes_sent: float = 0.0  # by a worker
    memory_bytes: int = 0  # kept between steps beside the model and its optimizer, by a worker
    passes: int = 1  # backward passes of a worker in a step, of as many batches
    rounds: float = 0.0  # in which workers wait for each other's answers, a step
    expected_steps: float = 1.0  # to a loss, over Dense()'s: a prior, that a race corrects
    excluded: str | None = None  # why it is left out; numbers above are then 0 where nothing was priced

    @property
    def expected_seconds(self) -> float:
        """Seconds to a loss for which Dense() needs one step: what candidates are ordered by."""
        return self.step_seconds * self.expected_steps


Progress = Callable[[int, int, str], None]  # how many candidates are priced, of how many, which is the next


def foretell(
    candidates: Sequence[Candidate],
    profile: WorkloadProfile,
    network: Network,
    workers: int,
    on_progress: Progress = lambda done, of, recipe: None,
    *,
    pricer: StepPricer | None = None,
) -> list[Foretold]:
    """Price every candidate, in their order; what is excluded stays, unpriced.

    profile: of the script with `resolve(None)`, lock step and nothing compressed: all others' follow from it and from
    codecs that are timed here. pricer: one that has priced for this profile, whose timings are used again.
    """
    raise NotImplementedError
