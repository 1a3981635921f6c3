"""Start, watch and end the workers and servers of one run, each by itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gossamer.errors import PeerLost
from gossamer.launch.failure import Failure, Outcome, cause, from_exit, from_report
from gossamer.launch.job import Job, Serving
from gossamer.launch.logs.follow import Show
from gossamer.launch.logs.run_files import RunFiles, read_json
from gossamer.launch.logs.streams import ProcessLog, ServerLog, WorkerLog, server_log_path
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.process import POLL_SECONDS, ManagedProcess, end_all, placed
from gossamer.launch.reaper import PATIENCE_SECONDS
from gossamer.launch.standby import Spare

SERVER_RESTARTS = 10
# An error sooner than this is one that the next start would meet again
SETTLED_SECONDS = 10.0
STRANDED = "it was lost while no other worker trained, so there is nothing that the others could go on from"


class Supervisor:
    """Starts, watches and ends one run's workers and servers. Of its members the workers come first, by rank.

    trains(rank, attempt): whether this start of a worker has parameters that another could go on from.
    """

    def __init__(
        self,
        job: Job,
        serving: Serving,
        files: RunFiles,
        guard: OrphanReaper,
        surroundings: Mapping[str, str],
        trains: Callable[[int, int], bool],
        show: Show,
        note: Callable[[str], None],
    ) -> None:
        self._job = job
        self._files = files
        self._guard = guard
        self._trains = trains
        self._note = note
        self._endpoints = surroundings["GOSSAMER_SERVERS"].split(",")
        self._workers = [self._worker(rank, surroundings) for rank in range(job.workers)]
        self._spares = self._kept(serving, surroundings)
        self._servers = [self._server(server, serving.command, surroundings) for server in range(serving.servers)]
        self._voices: list[ProcessLog] = [WorkerLog(job, rank, files, show) for rank in range(job.workers)]
        for server, member in enumerate(self._servers):
            self._voices.append(ServerLog(server, member.number, files, job.logs, serving.command, note))
        self._finished: set[int] = set()
        self._lost: list[Failure] = []
        self._failed: list[Failure] = []

    def run(self, signals: Sequence[int]) -> Outcome:
        """To the end, of which nobody is left. signals: grows where somebody asks to stop; twice is in a hurry."""
        try:
            for member in (*self._servers, *self._workers):
                self._start(member)
            while not signals and not self._failed and self._any_worker_lives():
                for spare in self._spares:
                    spare.look()
                time.sleep(POLL_SECONDS)
        finally:
            stopped = end_all([*self._workers, *self._servers], PATIENCE_SECONDS, lambda: len(signals) > 1)
            for spare in self._spares:
                spare.close()
        restarts = sum(worker.attempt for worker in self._workers)
        if signals and not self._failed:
            return Outcome(signal=signals[0], restarts=restarts)
        return Outcome(failure=self._cause(stopped), restarts=restarts)

    def look(self) -> None:
        for voice in self._voices:
            voice.look()

    def close(self) -> None:
        for voice in self._voices:
            voice.close()

    def _any_worker_lives(self) -> bool:
        """After doing what is to be done about those that ended since the last look, servers too."""
        for worker in self._workers:
            if (exit_code := worker.ended()) is not None:
                self._worker_ended(worker, exit_code)
        for server, member in enumerate(self._servers):
            if (exit_code := member.ended()) is not None:
                self._server_ended(server, member, exit_code)
        return any(worker.lives for worker in self._workers)

    def _start(self, member: ManagedProcess) -> None:
        self._voices[member.number].begin(member.attempt + 1)
        member.start()

    def _worker_ended(self, worker: ManagedProcess, exit_code: int) -> None:
        if not exit_code:
            self._finished.add(worker.number)
            return
        failure = self._failure(worker, exit_code, stopped=False)
        self._voices[worker.number].note(failure.traceback or str(failure))
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
        """Without servers nobody is left to go on with, once one worker has come to the end with all others, or all
        others were lost."""
        return not self._servers and (bool(self._finished) or not any(worker.lives for worker in self._workers))

    @property
    def _stranded(self) -> bool:
        """Whether those that are left have nothing to go on from: they wait to meet who was lost, or came back
        themselves and look for somebody who was not."""
        left = [worker for worker in self._workers if worker.lives]
        if self._servers or self._finished or not left:
            return False
        return not any(self._trains(worker.number, worker.attempt) for worker in left)

    def _server_ended(self, server: int, member: ManagedProcess, exit_code: int) -> None:
        end = from_exit(member.number, exit_code, time.time(), stopped=False)
        self._voices[member.number].note(f"# server {server} ended with {end.ending}")
        log = server_log_path(self._job.logs, server)
        if exit_code > 0 and member.age_seconds < SETTLED_SECONDS:
            raise PeerLost(
                f"Server {server} failed at its start ({end.ending}) and would fail again, so its parameters are out "
                f"of reach and all workers were stopped. Its own message is above and in {log}"
            )
        if member.attempt >= SERVER_RESTARTS:
            raise PeerLost(
                f"Server {server} ended {member.attempt + 1} times, the last time with {end.ending}, so all workers "
                f"were stopped. What it said is in {log}; if memory ran out, spread the parameters: --servers "
                f"{len(self._servers) + 1}"
            )
        self._note(
            f"server {server} ended with {end.ending}. Restarting it at {self._endpoints[server]} with its journal "
            f"({member.attempt + 1} of at most {SERVER_RESTARTS})."
        )
        self._start(member)

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
                self._voices[worker.number].note(failure.traceback or str(failure))
                failures.append(failure)
        return cause(failures)

    def _all_lost(self) -> Failure:
        count = len(self._workers)
        return replace(self._lost[-1], summary=f"all {count} workers were lost, this one last" if count > 1 else "")

    def _worker(self, rank: int, surroundings: Mapping[str, str]) -> ManagedProcess:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}

        def environment(attempt: int) -> Mapping[str, str]:
            again = {"GOSSAMER_REJOIN": "1"} if attempt else {}
            return {**surroundings, **place, **again, "TORCHELASTIC_RESTART_COUNT": str(attempt)}

        command = (sys.executable, *self._job.worker_arguments)
        return ManagedProcess(rank, self._files, self._guard, command, environment, self._job.prefix)

    def _server(self, server: int, command: Sequence[str], surroundings: Mapping[str, str]) -> ManagedProcess:
        journal = self._files.directory / f"journal-{server}"
        journal.mkdir(mode=0o700)
        place = {"GOSSAMER_SERVER": str(server), "GOSSAMER_JOURNAL": str(journal)}
        number = self._job.workers + server
        environment = {**surroundings, **place}
        spare = self._spares[server % len(self._spares)]
        return ManagedProcess(
            number, self._files, self._guard, command, lambda attempt: environment, self._job.prefix, begin=spare.take
        )

    def _kept(self, serving: Serving, surroundings: Mapping[str, str]) -> list[Spare]:
        """One that can take any server's place; where each has a host of its own, one on each."""
        count = serving.servers if self._job.prefix else min(serving.servers, 1)
        hosts = range(self._job.workers, self._job.workers + count)
        return [
            Spare(
                placed(number, self._job.prefix, serving.spare) if serving.spare else (),
                surroundings,
                self._files.directory / f"spare-{number}.txt",
                self._files.directory / f"spare-{number}-boot.txt",
                self._guard,
            )
            for number in hosts
        ]
