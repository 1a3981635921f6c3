"""Collector: keeps a run's store up to date, in a thread of its launcher that never blocks the launcher."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gossamer.base.run_files import RunFiles
from gossamer.observe.event_log import LineFile
from gossamer.observe.telemetry import stragglers
from gossamer.observe.telemetry.hangs import HangWatch
from gossamer.observe.telemetry.ingest import Ingest
from gossamer.observe.telemetry.machines import MachineDesk, Ranks
from gossamer.observe.telemetry.store import STORE_FILE
from gossamer.observe.vitals import machine_vitals

if TYPE_CHECKING:
    from gossamer.observe.telemetry.uplink import Uplink

LOOK_SECONDS = 0.5
VITALS_LOOKS = 4  # number of looks between samples of the machine
CAUSE_LOOKS = 2  # between searches for a straggler
AGAIN_LOOKS = 4  # before a failed store is retried
TAKES_NOTHING = (
    "the run's store {file} cannot be written ({reason}). Training and its record continue, and existing rows can be "
    "read. Free some space: the store is retried, and then also receives the rows since this moment."
)


class Collector:
    """Context manager: during the block, the content of a run's files in `directory` is written to the store in `logs`.

    A store of an earlier run is renamed.

    Args:
        directory: private files of the run.
        logs: folder of the store.
        others: receiver of rows from other machines' launchers.
        uplink: sends rows to the first machine, for a launcher that joined its run.
        facts: of the whole run.
        note: called once if the store cannot be written. No rows are lost if it can be written again while the run's
            own files exist.
    """

    def __init__(
        self,
        logs: Path,
        directory: Path,
        facts: Mapping[str, Any],
        note: Callable[[str], None],
        others: MachineDesk | None = None,
        uplink: Uplink | None = None,
    ) -> None:
        self._others, self._uplink, self._workers = others, uplink, range(facts.get("workers", 0))
        self._uplinked = ExitStack()
        self._book: Ranks | None = None  # if other launchers have ranks, too
        self._logs, self._directory, self._note = logs, directory, note
        self._messages = LineFile(RunFiles(directory).launcher_messages, lambda sentence: None)
        self._telling = threading.Lock()  # notes come from several threads of the launcher
        self._ingest: Ingest | None = None  # None while the store cannot be written
        self._noted = self._is_aside = False
        self._hangs = HangWatch(directory, self.notes_recorded_by(note), self.report)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer collector", daemon=True)
        self.report("facts", facts={**facts, "started": time.time()})

    def report(self, kind: str, **content: Any) -> None:
        """Add an entry of the launcher: a note, facts, or an event."""
        with self._telling:
            self._messages.append({"kind": kind, "moment": time.time(), **content})

    def notes_recorded_by(self, note: Callable[[str], None]) -> Callable[[str], None]:
        """Wrap `note`, so that each note is also written to the store."""

        def both(sentence: str) -> None:
            self.report("note", text=sentence)
            note(sentence)

        return both

    def ended(self, how: str) -> None:
        self.report("facts", facts={"ended": time.time(), "how": how})

    def __enter__(self) -> Collector:
        if self._uplink is not None:
            self._uplinked.enter_context(self._uplink)
        self._guarded(self._open)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is not None:
            self.ended("failed")
        self._over.set()
        self._thread.join()
        if self._others is not None:
            self._others.await_farewells()
        self._guarded(self._finish)
        self._uplinked.close()
        self._messages.close()

    def _open(self) -> None:
        if not self._is_aside:
            set_aside(self._logs / STORE_FILE)
            self._is_aside = True
        forward = (lambda rows: None) if self._uplink is None else self._uplink.forward
        self._ingest = ingest = Ingest(
            self._logs, directory=self._directory, forward=forward, ranks=self._ranks(), note=self._note
        )
        if self._others is not None:
            self._book = self._others.numbering(ingest.db, self._workers)

    def _ranks(self) -> Callable[[int], int | None] | None:
        """Mapping of this launcher's ranks; needed if workers join on other machines, which may have taken a number."""
        if self._others is None:
            return None
        return lambda number: None if self._book is None else self._book.rank(0, number)

    def _look(self) -> Ingest:
        if self._ingest is None:
            self._open()
        assert self._ingest is not None
        self._ingest.look()
        if self._others is not None and self._book is not None:
            self._others.drain(self._ingest.db, self._book)
        return self._ingest

    def _find_causes(self) -> None:
        if self._ingest is not None:
            with self._ingest.db as db:
                self._hangs.look(db)
                stragglers.look(db, time.time())

    def _finish(self) -> None:
        self._look().finish()

    def _run(self) -> None:
        machine = machine_vitals()
        looks = 0
        while not self._over.wait(LOOK_SECONDS):
            looks += 1
            if self._ingest is not None or looks % AGAIN_LOOKS == 0:
                self._guarded(self._look)
            if looks % VITALS_LOOKS == 0:
                self.report("vitals", values=machine.sample())
            if looks % CAUSE_LOOKS == 0:
                self._guarded(self._find_causes)

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run an action; log any error instead of raising it, since a failing store must not end a run."""
        try:
            action()
        except Exception as problem:
            if self._ingest is not None:
                with suppress(Exception):
                    self._ingest.close()
            self._ingest = self._book = None
            if not self._noted:
                self._noted = True
                self._note(TAKES_NOTHING.format(file=self._logs / STORE_FILE, reason=problem))


def set_aside(path: Path) -> Path | None:
    """Rename an existing store to the time of its last write, for a new run's store."""
    if not path.exists():
        return None
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(path.stat().st_mtime))
    kept = path.with_name(f"{path.stem}-{stamp}{path.suffix}")
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{kept}{suffix}")
    return kept
