"""Member process: fills one place of an elastic run on this machine, with one process after the other."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping

from gossamer.base.run_files import RunFiles, Stage, read_json
from gossamer.launch.failure import Failure, from_exit, from_report
from gossamer.launch.job import Job
from gossamer.launch.logs.follow import Show, WorkerLog
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.process import ManagedProcess
from gossamer.launch.restart_policy import RestartPolicy


class MemberProcess:
    """Each start is another member, with a number of its own. Implements CrewMember.

    shared_environment: what all workers have. initial: whether the first start is one of the run's first workers, which
    have the same parameters without being sent any.
    """

    def __init__(
        self,
        job: Job,
        place: int,
        files: RunFiles,
        orphan_reaper: OrphanReaper,
        shared_environment: Mapping[str, str],
        show: Show,
        *,
        initial: bool,
    ) -> None:
        self.place = place
        self.log = WorkerLog(job, place, files, show)
        self.policy = RestartPolicy(job.max_restarts)
        self.due: float | None = None
        self.numbers: list[int] = []
        self._files, self._initial, self._shared_environment = files, initial, shared_environment
        command = (sys.executable, *job.worker_arguments)
        self.process = ManagedProcess(place, files, orphan_reaper, command, self._environment, job.prefix)

    @property
    def number(self) -> int:
        return self.numbers[-1]

    @property
    def lives(self) -> bool:
        return self.process.lives

    @property
    def age_seconds(self) -> float:
        return self.process.age_seconds

    @property
    def attached(self) -> bool:
        return self.lives and self._files.has_reached(Stage.ATTACHED, self.place)

    @property
    def has_ever_attached(self) -> bool:
        return self._files.has_ever_reached(Stage.ATTACHED, self.place)

    @property
    def holds_state(self) -> bool:
        return self.attached or (self.lives and self._initial and self.process.attempt == 0)

    @property
    def has_left(self) -> bool:
        return self._files.has_reached(Stage.LEFT, self.place)

    @property
    def is_finishing(self) -> bool:
        finished = self.lives and self._files.finished(self.place, self.process.attempt).exists()
        return finished and not self.has_left

    def start(self) -> None:
        self.numbers.append(secrets.randbits(63))
        self.log.begin(self.process.attempt + 1)
        self.process.start()

    def ended(self) -> int | None:
        return self.process.ended()

    def failure(self, exit_code: int, *, stopped: bool) -> Failure:
        """Why the newest start failed; the log has it, too."""
        report = read_json(self._files.failure(self.place, self.process.attempt))
        found = from_report(report) if report else from_exit(self.place, exit_code, time.time(), stopped)
        self.log.note(found.traceback or str(found))
        return found

    @property
    def lost_residual(self) -> str:
        told = read_json(self._files.residual(self.place, self.process.attempt))
        if not told or not told["norm"]:
            return ""
        return f"Its residual, of norm {told['norm']:.3g} after step {told['step']}, is lost with it"

    def _environment(self, attempt: int) -> Mapping[str, str]:
        place = str(self.place)
        return {
            **self._shared_environment,
            "RANK": place,
            "LOCAL_RANK": place,
            "GOSSAMER_PLACE": place,
            "GOSSAMER_MEMBER": str(self.number),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
