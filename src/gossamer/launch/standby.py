"""Standby: waits, in a process that has imported everything, to take a lost server's place."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.process import signal_group, spawn

# Processes that start at this moment have more use for the CPU
DELAY_SECONDS = 1.0


class StandbyProcess:
    """At most one process that waits on its standard input for a line of JSON: the environment it does not have yet.

    A server that is started from nothing imports for five seconds on an idle machine, and for fifteen on a busy one,
    while all workers wait; a standby listens within a fraction of a second. Its cost meanwhile: no CPU time, and 315 MB
    of resident memory, of which 90 MB are files that the other processes have in memory, too.

    command: what it runs, empty for no standby; output, boot: files for what it prints until it is taken. It ends when
    its input does, and by `orphan_reaper`, so that it outlives no launcher.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        boot: Path,
        orphan_reaper: OrphanReaper,
    ) -> None:
        self._command, self._environment, self._output, self._boot = command, environment, output, boot
        self._orphan_reaper = orphan_reaper
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._delay()

    def look(self) -> None:
        """Start one where there is none, a moment after the last was taken or anything else began."""
        if self._process is not None or not self._command or time.monotonic() < self._due:
            return
        self._delay()
        with contextlib.suppress(OSError):  # no memory, perhaps: training goes on without one
            self._process = spawn(self._command, self._environment, self._output, self._boot, given=subprocess.PIPE)
            self._orphan_reaper.add(self._process.pid)

    def take(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, boot: Path
    ) -> subprocess.Popen[bytes]:
        """A process with this environment, as `spawn` starts one: the one that waits, or another where it is gone."""
        process, self._process = self._process, None
        self._delay()
        if process is not None and process.stdin is not None and process.poll() is None:
            missing = {name: text for name, text in environment.items() if self._environment.get(name) != text}
            with contextlib.suppress(OSError):
                self._output.replace(output)
                self._boot.replace(boot)
                process.stdin.write(json.dumps(missing).encode() + b"\n")
                process.stdin.close()
                return process
        if process is not None:
            self._end(process)
        return spawn(command, environment, output, boot)

    def close(self) -> None:
        """Kill the standby, which holds no state."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        signal_group(process.pid, signal.SIGKILL)
        process.communicate()
        self._orphan_reaper.remove(process.pid)

    def _delay(self) -> None:
        self._due = time.monotonic() + DELAY_SECONDS
