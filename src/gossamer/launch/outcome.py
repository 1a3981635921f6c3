"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.launch.failure import Failure

LOOK_SECONDS = 0.05  # between looks at what workers print


@dataclass(frozen=True)
class Outcome:
    """How a run ended: well, by a failure, or by a signal to the launcher; and after how many restarts."""

    failure: Failure | None = None
    signal: int | None = None
    restarts: int = 0

    @property
    def exit_code(self) -> int:
        if self.signal is not None:
            return 128 + self.signal
        return self.failure.shell_code if self.failure else 0
