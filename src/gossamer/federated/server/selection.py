"""Selection: policies that sample the next clients among those that wait for a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
from random import Random
from typing import Any, Protocol

from gossamer.base import rng
from gossamer.errors import require
from gossamer.federated.messages import Report


class SelectionPolicy(Protocol):
    """Chooses devices, deterministically for the same seed, devices and earlier observations."""

    @property
    def draws_each(self) -> bool:
        """Whether each device is drawn independently, regardless of `count`. The server then waits for all devices."""
        return False

    @property
    def reads_metrics(self) -> bool:
        """Whether the policy reads the metrics in reports, which are not available with secure aggregation."""
        return False

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        """Choose `count` devices.

        Args:
            available: device numbers, ascending, at least `count`.
            count: number of devices.
            index: of the choice.

        Returns:
            Device numbers, ascending.
        """

    def record_report(self, client: int, report: Report, seconds: float) -> None:
        """A device's contribution was counted, `seconds` after the device was chosen."""
        return None

    def missed(self, client: int, seconds: float) -> None:
        """A device had not reported when its round ended, `seconds` after it was chosen."""
        return None

    @property
    def remembers(self) -> str:
        """Name of the field with the observations per device; empty: there is no such field."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The observations per device."""
        return {self.remembers: dict(getattr(self, self.remembers))} if self.remembers else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. The state of another policy is ignored."""
        if self.remembers:
            setattr(self, self.remembers, dict(state.get(self.remembers, {})))


@dataclass(frozen=True)
class Uniform(SelectionPolicy):
    """Uniform sampling without replacement."""

    seed: int = 0

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        return sorted(_random(self.seed, index).sample(available, count))


@dataclass
class LeastTrained(SelectionPolicy):
    """Chooses the devices that were counted least often, with random ties. For devices with uneven availability."""

    seed: int = 0
    counted: dict[int, int] = field(default_factory=dict, init=False)

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        random = _random(self.seed, index)
        ranked = sorted((self.counted.get(client, 0), random.random(), client) for client in available)
        return sorted(client for *_, client in ranked[:count])

    def record_report(self, client: int, report: Report, seconds: float) -> None:
        self.counted[client] = self.counted.get(client, 0) + 1

    @property
    def remembers(self) -> str:
        return "counted"


@dataclass
class PowerOfChoice(SelectionPolicy):
    """Chooses the devices with the largest loss among candidates sampled by their numbers of samples.

    The loss is the last value that a device reported under `metric`. Devices without a loss come first.
    source: Cho, Wang & Joshi 2020 (Client selection in federated learning; the variant that needs no extra round trip)
    """

    seed: int = 0
    candidates: float = 2.0  # sampled per chosen device
    metric: str = "loss"  # of Update.metrics
    losses: dict[int, tuple[float, int]] = field(default_factory=dict, init=False)  # loss and samples, by device

    def __post_init__(self) -> None:
        require(self.candidates >= 1, f"candidates must be 1 or more per chosen device, got {self.candidates}")

    @property
    def reads_metrics(self) -> bool:
        return True

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        random = _random(self.seed, index)
        usual = sum(samples for _, samples in self.losses.values()) / len(self.losses) if self.losses else 1.0
        drawn = sorted(  # weighted sampling without replacement: Efraimidis & Spirakis 2006
            (-log(1.0 - random.random()) / max(self._samples(client, usual), 1e-9), client) for client in available
        )[: max(count, round(self.candidates * count))]
        ranked = sorted(drawn, key=lambda each: (-self.losses.get(each[1], (inf, 0))[0], each))
        return sorted(client for _, client in ranked[:count])

    def _samples(self, client: int, usual: float) -> float:
        return self.losses[client][1] if client in self.losses else usual

    def record_report(self, client: int, report: Report, seconds: float) -> None:
        if self.metric in report.metrics:
            self.losses[client] = float(report.metrics[self.metric]), report.samples

    @property
    def remembers(self) -> str:
        return "losses"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"losses": state.get("told", {}), **state})  # the name in earlier journals


@dataclass
class WithinDeadline(SelectionPolicy):
    """Chooses devices that met the deadline last time or are untested, then the fastest of the others.

    Give the rounds the same deadline: `round_seconds`.
    source: Nishio & Yonetani 2019, ICC (FedCS), with measured instead of promised times
    """

    deadline_seconds: float
    seed: int = 0
    explored: float = 0.05  # fraction of choices that may be slow devices, which may have become faster
    seconds: dict[int, float] = field(default_factory=dict, init=False)  # last duration, by device

    def __post_init__(self) -> None:
        require(self.deadline_seconds > 0, f"deadline_seconds must be above 0, got {self.deadline_seconds}")
        require(0 <= self.explored <= 1, f"explored must be in [0, 1], got {self.explored}")

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        random = _random(self.seed, index)
        slow = [client for client in available if self.seconds.get(client, 0.0) >= self.deadline_seconds]
        held_back = set(slow)
        fast = [client for client in available if client not in held_back]
        tried = random.sample(slow, min(len(slow), sum(random.random() < self.explored for _ in range(count))))
        chosen = tried + random.sample(fast, min(len(fast), count - len(tried)))
        rest = sorted(held_back.difference(tried), key=lambda client: (self.seconds[client], client))
        return sorted(chosen + rest[: count - len(chosen)])

    def record_report(self, client: int, report: Report, seconds: float) -> None:
        self.seconds[client] = seconds

    def missed(self, client: int, seconds: float) -> None:
        self.seconds[client] = max(seconds, self.seconds.get(client, 0.0))

    @property
    def remembers(self) -> str:
        return "seconds"


def within_deadline(seed: int, deadline_seconds: float) -> SelectionPolicy:
    """WithinDeadline with a finite deadline. Raises ValueError otherwise."""
    require(
        deadline_seconds < inf,
        "--selection within-deadline chooses devices that met --round-seconds the last time: add "
        "--round-seconds 600, or write --selection uniform",
    )
    return WithinDeadline(deadline_seconds, seed)


NAMED: Mapping[str, Callable[[int, float], SelectionPolicy]] = {  # of a seed and the seconds of a round
    "uniform": lambda seed, _: Uniform(seed),
    "least-trained": lambda seed, _: LeastTrained(seed),
    "power-of-choice": lambda seed, _: PowerOfChoice(seed),
    "within-deadline": within_deadline,
}


def _random(seed: int, index: int) -> Random:
    return Random(rng.address(seed, "selection", index))
