"""Background save: writes one rank's part during training; a step is complete once all parts of the save exist.

No rank waits for another rank's disk. The parts of a save are recognized by its name, which the ranks agree on at the
start, and which is in every part's manifest. `coordinated.load` accepts a step if all parts have the same name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.train import checkpoint
from gossamer.train.checkpoint.snapshot import Flat


@dataclass
class BackgroundSave:
    """One rank's part of one save, written on a thread that also finishes after the main thread has ended.

    Call begin() first; `error` is set after wait().

    parts: by rank: the rank's own part as a `Flat`, and files of other ranks as they are.
    """

    directory: str
    step: int
    rank: int
    world: int
    keep: int
    parts: Mapping[int, Flat | list[bytes]]
    about: Mapping[str, str]  # with the name of the "save"
    error: Exception | None = None
    _thread: threading.Thread = field(init=False)

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._write, name="gossamer-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _write(self) -> None:
        try:
            for rank, part in self.parts.items():
                self._write_part(rank, part)
        except Exception as error:
            self.error = error

    def _write_part(self, rank: int, part: Flat | list[bytes]) -> None:
        digests = [""] * self.world  # only the own one is known
        if isinstance(part, Flat):
            digests[rank] = checkpoint.stage(self.directory, self.step, rank, part)
        else:
            digests[rank] = checkpoint.stage_pieces(self.directory, self.step, rank, part)
        checkpoint.complete(self.directory, self.step, rank, digests, dict(self.about), keep=None)

    def prune(self) -> None:
        """Remove older checkpoints, once all parts exist."""
        for rank in self.parts:
            checkpoint.prune(self.directory, self.step, rank, self.world, self.keep)
