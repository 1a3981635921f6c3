"""Loss history: backs off exponentially from places whose workers are lost again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
FORGOTTEN_AFTER_SECONDS = 300.0  # without a loss: what comes then is the first again


@dataclass
class LossHistory:
    """Losses by place. A worker there is let in 1 s after the first loss, 2 s after the second, at most 30 s."""

    _losses: dict[str, tuple[int, float]] = field(default_factory=dict)  # how many in a row, and when the last was

    def lost(self, place: str, now: float) -> None:
        count, last = self._losses.get(place, (0, now))
        self._losses[place] = (1 if now - last > FORGOTTEN_AFTER_SECONDS else count + 1), now

    def count(self, place: str) -> int:
        return self._losses.get(place, (0, 0.0))[0]

    def opens_at(self, place: str) -> float:
        """When a worker there may be let in; a moment that has passed where nothing was lost."""
        if place not in self._losses:
            return float("-inf")
        count, last = self._losses[place]
        return last + min(FIRST_SECONDS * 2.0 ** min(count - 1, 10), LONGEST_SECONDS)
