"""Supervisor: starts, watches, restarts and ends the workers and servers of one run, one by one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gossamer.base.run_files import RunFiles, read_json
from gossamer.errors import PeerLost
from gossamer.launch.failure import Failure, Outcome, cause, from_exit, from_report
from gossamer.launch.job import Job, Serving
from gossamer.launch.logs.follow import Show, WorkerLog
from gossamer.launch.logs.streams import ProcessLog, ServerLog, server_log_path
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.process import POLL_SECONDS, ManagedProcess, end_all, placed
from gossamer.launch.standby import StandbyProcess
from gossamer.launch.stop_request import StopRequest, end_by_request

SERVER_RESTARTS = 10
# An error sooner than this is one that the next start would meet again
SETTLED_SECONDS = 10.0
STRANDED = "it was lost while no other worker trained, so there is nothing that the others could go on from"


class Supervisor:
    """Supervises one run's processes. They are numbered: workers by rank, then servers.

    trains(rank, attempt): whether this start of a worker has parameters that another could go on from. exited(rank):
    called once a worker has ended and is not started again.
    """

    def __init__(
        self,
        job: Job,
        serving: Serving,
        files: RunFiles,
        orphan_reaper: OrphanReaper,
        shared_environment: Mapping[str, str],
        trains: Callable[[int, int], bool],
        exited: Callable[[int], None],
        show: Show,
        note: Callable[[str], None],
    ) -> None:
        self._job = job
        self._files = files
        self._orphan_reaper = orphan_reaper
        self._trains, self._exited = trains, exited
        self._note = note
        self._endpoints = shared_environment["GOSSAMER_SERVERS"].split(",")
        self._workers = [self._worker(rank, shared_environment) for rank in range(job.workers)]
        self._standbys = self._standby_by_host(serving, shared_environment)
        self._servers = [self._server(server, serving.command, shared_environment) for server in range(serving.servers)]
        self._logs: list[ProcessLog] = [WorkerLog(job, rank, files, show) for rank in range(job.workers)]
        for server, process in enumerate(self._servers):
            self._logs.append(ServerLog(server, process.number, files, job.logs, serving.command, note))
        self._finished: set[int] = set()
        self._lost: list[Failure] = []
        self._failed: list[Failure] = []

    def run(self, stop: StopRequest) -> Outcome:
        """Run until no process is left."""
        try:
            for process in (*self._servers, *self._workers):
                self._start(process)
            while not stop and not self._failed and self._any_worker_lives():
                for standby in self._standbys:
                    standby.look()
                time.sleep(POLL_SECONDS)
            if stop:
                end_by_request(self._workers, stop, self._files, self._job.grace_seconds, self._note)
        finally:
            stopped = end_all(self._workers, hurried=stop.hurried)
            end_all(self._servers, hurried=stop.hurried)  # which workers that save may have asked
            for standby in self._standbys:
                standby.close()
        restarts = sum(worker.attempt for worker in self._workers)
        if stop and not self._failed:
            return Outcome(signal=stop.number, restarts=restarts)
        return Outcome(failure=self._cause(stopped), restarts=restarts)

    def look(self) -> None:
        for log in self._logs:
            log.look()

    def close(self) -> None:
        for log in self._logs:
            log.close()

    def _any_worker_lives(self) -> bool:
        """Handle the ends of workers and servers since the last call; whether a worker is left."""
        for worker in self._workers:
            if (exit_code := worker.ended()) is not None:
                self._worker_ended(worker, exit_code)
                if not worker.lives:
                    self._exited(worker.number)
        for server, process in enumerate(self._servers):
            if (exit_code := process.ended()) is not None:
                self._server_ended(server, process, exit_code)
        return any(worker.lives for worker in self._workers)

    def _start(self, process: ManagedProcess) -> None:
        self._logs[process.number].begin(process.attempt + 1)
        process.start()

    def _worker_ended(self, worker: ManagedProcess, exit_code: int) -> None:
        if not exit_code:
            self._finished.add(worker.number)
            return
        failure = self._failure(worker, exit_code, stopped=False)
        self._logs[worker.number].note(failure.traceback or str(failure))
        if failure.exit_code > 0:
            self._failed.append(failure)
        elif self._stranded:
            self._failed.append(replace(failure, summary=STRANDED))
        elif worker.attempt < self._job.max_restarts and not self._over:
            attempt = f"{worker.attempt + 1} of at most {self._job.max_restarts}"
            self._note(f"rank {worker.number} was lost ({failure.ending}). Restarting it alone ({attempt}).")
            self._start(worker)
        else:
            self._lost.append(failure)
            left = sum(other.lives for other in self._workers)
            going = {0: "Nobody is left to train", 1: "The other one goes on"}.get(left, f"The other {left} go on")
            self._note(f"rank {worker.number} was lost ({failure.ending}). {going}.")

    @property
    def _over(self) -> bool:
        """Whether a restarted worker would find no other to go on with: no servers, and the others finished or lost."""
        return not self._servers and (bool(self._finished) or not any(worker.lives for worker in self._workers))

    @property
    def _stranded(self) -> bool:
        """Whether no worker that is left has parameters: they wait for the lost one, or were restarted themselves."""
        left = [worker for worker in self._workers if worker.lives]
        if self._servers or self._finished or not left:
            return False
        return not any(self._trains(worker.number, worker.attempt) for worker in left)

    def _server_ended(self, server: int, process: ManagedProcess, exit_code: int) -> None:
        end = from_exit(process.number, exit_code, time.time(), stopped=False)
        self._logs[process.number].note(f"# server {server} ended with {end.ending}")
        log = server_log_path(self._job.logs, server)
        if exit_code > 0 and process.age_seconds < SETTLED_SECONDS:
            raise PeerLost(
                f"Server {server} failed at its start ({end.ending}) and would fail again, so its parameters are out "
                f"of reach and all workers were stopped. Its own message is above and in {log}"
            )
        if process.attempt >= SERVER_RESTARTS:
            raise PeerLost(
                f"Server {server} ended {process.attempt + 1} times, the last time with {end.ending}, so all workers "
                f"were stopped. What it said is in {log}; if memory ran out, spread the parameters: --servers "
                f"{len(self._servers) + 1}"
            )
        self._note(
            f"server {server} ended with {end.ending}. Restarting it at {self._endpoints[server]} with its journal "
            f"({process.attempt + 1} of at most {SERVER_RESTARTS})."
        )
        self._start(process)

    def _failure(self, worker: ManagedProcess, exit_code: int, stopped: bool) -> Failure:
        report = read_json(self._files.failure(worker.number, worker.attempt))
        if report is not None:
            return from_report(report)
        return from_exit(worker.number, exit_code, time.time(), stopped)

    def _cause(self, stopped: Mapping[int, int]) -> Failure | None:
        """Why the run failed, if it did. A worker that was lost is the cause only where all were."""
        if not self._failed:
            return None if self._finished or not self._lost else self._all_lost()
        failures = list(self._failed)
        for worker in self._workers:
            if stopped.get(worker.number):
                failure = self._failure(worker, stopped[worker.number], stopped=True)
                self._logs[worker.number].note(failure.traceback or str(failure))
                failures.append(failure)
        return cause(failures)

    def _all_lost(self) -> Failure:
        count = len(self._workers)
        return replace(self._lost[-1], summary=f"all {count} workers were lost, this one last" if count > 1 else "")

    def _worker(self, rank: int, shared_environment: Mapping[str, str]) -> ManagedProcess:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}

        def environment(attempt: int) -> Mapping[str, str]:
            again = {"GOSSAMER_REJOIN": "1"} if attempt else {}
            return {**shared_environment, **place, **again, "TORCHELASTIC_RESTART_COUNT": str(attempt)}

        command = (sys.executable, *self._job.worker_arguments)
        return ManagedProcess(rank, self._files, self._orphan_reaper, command, environment, self._job.prefix)

    def _server(self, server: int, command: Sequence[str], shared_environment: Mapping[str, str]) -> ManagedProcess:
        journal = self._files.directory / f"journal-{server}"
        journal.mkdir(mode=0o700)
        place = {"GOSSAMER_SERVER": str(server), "GOSSAMER_JOURNAL": str(journal)}
        number = self._job.workers + server
        environment = {**shared_environment, **place}
        standby = self._standbys[server % len(self._standbys)]
        return ManagedProcess(
            number,
            self._files,
            self._orphan_reaper,
            command,
            lambda attempt: environment,
            self._job.prefix,
            begin=standby.take,
        )

    def _standby_by_host(self, serving: Serving, shared_environment: Mapping[str, str]) -> list[StandbyProcess]:
        """One standby for all servers; where each has a host of its own, one per host."""
        count = serving.servers if self._job.prefix else min(serving.servers, 1)
        hosts = range(self._job.workers, self._job.workers + count)
        return [
            StandbyProcess(
                placed(number, self._job.prefix, serving.standby) if serving.standby else (),
                shared_environment,
                self._files.directory / f"spare-{number}.txt",
                self._files.directory / f"spare-{number}-boot.txt",
                self._orphan_reaper,
            )
            for number in hosts
        ]
