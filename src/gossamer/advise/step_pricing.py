"""Step pricing: prices many recipes for one profiled script; codecs are timed once, models laid out once."""

from __future__ import annotations

from gossamer.estimate.step_time import StepTimeEstimate
from gossamer.estimate.traffic import TrafficEstimate
from gossamer.estimate.workload_profile import WorkloadProfile
from gossamer.network import Network
from gossamer.recipes.recipe import Recipe


class StepPricer:
    """Foretells steps of any recipe for one script, from its profile in lock step with nothing compressed."""

    def __init__(self, profile: WorkloadProfile, workers: int) -> None:
        raise NotImplementedError

    def profile(self, recipe: Recipe) -> WorkloadProfile:
        """What the script's step would be with a resolved recipe: its computing, that recipe's buckets and codecs."""
        raise NotImplementedError

    def step_time(self, recipe: Recipe, network: Network) -> StepTimeEstimate:
        """Seconds of a steady step of a resolved recipe on a network."""
        raise NotImplementedError

    def traffic(self, recipe: Recipe) -> TrafficEstimate:
        """Bytes that a resolved recipe sends and keeps."""
        raise NotImplementedError
