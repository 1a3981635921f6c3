"""Selection: which of the devices that are there train next.

Only devices that wait for a task are chosen from, so all of these choose by what is available.
"""

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
    """Chooses devices; the same for the same seed, the same devices and the same that was heard before."""

    @property
    def draws_each(self) -> bool:
        """Whether each device is drawn by itself, whatever `count` is, so that all who may come are waited for."""
        return False

    @property
    def reads_metrics(self) -> bool:
        """Whether it goes by what reports tell of a device's training, which they do not under masks."""
        return False

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        """`count` of `available`, which ascend and are at least as many; ascending. index: of the choice."""

    def heard(self, client: int, report: Report, seconds: float) -> None:
        """A device's contribution was counted, which came so many seconds after it was chosen."""
        return None

    def missed(self, client: int, seconds: float) -> None:
        """A device had not reported so many seconds after it was chosen, when its round ended."""
        return None

    @property
    def remembers(self) -> str:
        """The field that holds what is known of devices, by device; empty: nothing is."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers of devices."""
        return {self.remembers: dict(getattr(self, self.remembers))} if self.remembers else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; from nothing, where it is another policy's."""
        if self.remembers:
            setattr(self, self.remembers, dict(state.get(self.remembers, {})))


@dataclass(frozen=True)
class Uniform(SelectionPolicy):
    """Every device is as likely as any other."""

    seed: int = 0

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        return sorted(_random(self.seed, index).sample(available, count))


@dataclass
class LeastTrained(SelectionPolicy):
    """Those that were counted least often so far; ties are drawn. For devices some of which are seldom there."""

    seed: int = 0
    counted: dict[int, int] = field(default_factory=dict, init=False)

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        random = _random(self.seed, index)
        ranked = sorted((self.counted.get(client, 0), random.random(), client) for client in available)
        return sorted(client for *_, client in ranked[:count])

    def heard(self, client: int, report: Report, seconds: float) -> None:
        self.counted[client] = self.counted.get(client, 0) + 1

    @property
    def remembers(self) -> str:
        return "counted"


@dataclass
class PowerOfChoice(SelectionPolicy):
    """Those with the largest loss among `candidates` times as many, drawn by their numbers of samples.

    The loss is the last that a device told under `metric`; one that told none yet comes first.
    source: Cho, Wang & Joshi 2020 (Client selection in federated learning; the variant that needs no extra round trip)
    """

    seed: int = 0
    candidates: float = 2.0  # drawn for each that is chosen
    metric: str = "loss"  # of Update.metrics
    told: dict[int, tuple[float, int]] = field(default_factory=dict, init=False)  # loss and samples, by device

    def __post_init__(self) -> None:
        require(self.candidates >= 1, f"candidates is 1 or more for each that is chosen, not {self.candidates}")

    @property
    def reads_metrics(self) -> bool:
        return True

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        random = _random(self.seed, index)
        usual = sum(samples for _, samples in self.told.values()) / len(self.told) if self.told else 1.0
        drawn = sorted(  # without replacement, as likely as their weights: Efraimidis & Spirakis 2006
            (-log(1.0 - random.random()) / max(self._samples(client, usual), 1e-9), client) for client in available
        )[: max(count, round(self.candidates * count))]
        ranked = sorted(drawn, key=lambda each: (-self.told.get(each[1], (inf, 0))[0], each))
        return sorted(client for _, client in ranked[:count])

    def _samples(self, client: int, usual: float) -> float:
        return self.told[client][1] if client in self.told else usual

    def heard(self, client: int, report: Report, seconds: float) -> None:
        if self.metric in report.metrics:
            self.told[client] = float(report.metrics[self.metric]), report.samples

    @property
    def remembers(self) -> str:
        return "told"


@dataclass
class WithinDeadline(SelectionPolicy):
    """Devices that were done before the deadline the last time, or were not tried yet; the fastest others after them.

    Give the rounds the same deadline: `round_seconds`.
    source: Nishio & Yonetani 2019, ICC (FedCS), with times that were seen instead of promised
    """

    deadline_seconds: float
    seed: int = 0
    explored: float = 0.05  # share of the chosen that may be slow ones, which may have become faster
    seconds: dict[int, float] = field(default_factory=dict, init=False)  # the last, by device

    def __post_init__(self) -> None:
        require(self.deadline_seconds > 0, f"deadline_seconds is above 0, not {self.deadline_seconds}")
        require(0 <= self.explored <= 1, f"explored is a share in [0, 1], not {self.explored}")

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        random = _random(self.seed, index)
        slow = [client for client in available if self.seconds.get(client, 0.0) >= self.deadline_seconds]
        held_back = set(slow)
        fast = [client for client in available if client not in held_back]
        tried = random.sample(slow, min(len(slow), sum(random.random() < self.explored for _ in range(count))))
        chosen = tried + random.sample(fast, min(len(fast), count - len(tried)))
        rest = sorted(held_back.difference(tried), key=lambda client: (self.seconds[client], client))
        return sorted(chosen + rest[: count - len(chosen)])

    def heard(self, client: int, report: Report, seconds: float) -> None:
        self.seconds[client] = seconds

    def missed(self, client: int, seconds: float) -> None:
        self.seconds[client] = max(seconds, self.seconds.get(client, 0.0))

    @property
    def remembers(self) -> str:
        return "seconds"


def within_deadline(seed: int, deadline_seconds: float) -> SelectionPolicy:
    """WithinDeadline of a deadline that there is. Raises ValueError for none."""
    require(
        deadline_seconds < inf,
        "--selection within-deadline chooses devices that were done within --round-seconds the last time: add "
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
