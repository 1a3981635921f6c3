"""Virtual device: when a device answers, by its link, speed and hours; one task after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gossamer.base import rng
from gossamer.federated.population import DeviceProfile

DAY = 86_400.0


class TaskTimes(NamedTuple):
    """When a task came to its device, and when what it sends arrives: seconds of the virtual clock."""

    began: float
    arrived: float


@dataclass
class VirtualDevice:
    """A device, and until when it is busy."""

    number: int
    profile: DeviceProfile
    seed: int = 0
    free_from: float = 0.0
    tasks: int = 0

    def fails_next(self) -> bool:
        """Whether the device does not finish its next task: drawn by its number and the task's."""
        self.tasks += 1
        draw = rng.address(self.seed, "failure", self.number, self.tasks) / 2**63
        return draw < self.profile.failure

    def take(self, moment: float, down_bytes: int, steps: int, up_bytes: int) -> TaskTimes:
        """The times of a task that is sent at `moment`, which occupies the device until its answer has left."""
        profile = self.profile
        came = moment + profile.round_trip_seconds / 2 + 8 * down_bytes / profile.down_bits_per_second
        began = next_presence(profile, max(came, self.free_from))
        self.free_from = began + profile.seconds_per_step * steps + 8 * up_bytes / profile.up_bits_per_second
        return TaskTimes(began, self.free_from + profile.round_trip_seconds / 2)


def next_presence(profile: DeviceProfile, moment: float) -> float:
    """The first moment from then on at which a device is there."""
    if profile.present_seconds >= DAY:
        return moment
    into = (moment - profile.present_from) % DAY
    return moment if into < profile.present_seconds else moment + DAY - into
