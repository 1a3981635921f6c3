"""Served run: workers on one machine that are restarted one by one, and parameter servers if the recipe has any."""

from __future__ import annotations

import errno
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from gossamer.base.host_port import LOOPBACK
from gossamer.base.run_files import RunFiles
from gossamer.comm.environment import worker_registry
from gossamer.comm.environment.network_interfaces import interfaces
from gossamer.comm.environment.run_token import check_token_file, make_token_file
from gossamer.errors import ConnectError, PeerLost, require
from gossamer.launcher.failure import Failure, Outcome, cause, from_exit
from gossamer.launcher.job import Job, Serving, Spawn, inherited
from gossamer.launcher.process import ManagedProcess
from gossamer.launcher.process_logs import ServerLog, Show, WorkerLog, server_log_path
from gossamer.launcher.rendezvous import serve_store
from gossamer.launcher.restart_policy import SETTLED_SECONDS, RestartOne, failures_of_stopped
from gossamer.launcher.supervisor import Supervisor

SERVER_RESTARTS = 10
# Below the ephemeral ports: a client that dials an ephemeral port while its server is down may be assigned the same
# port as its own, connect to itself, and keep the port
PORTS = range(20000, 32000)


def launch_peers(
    job: Job,
    serving: Serving,
    directory: Path,
    *,
    show: Show,
    note: Callable[[str], None],
    tick: Callable[[], None],
) -> Outcome:
    """Run `job` with its servers, if any, until no worker is left. Call it in the main thread.

    A worker that a signal ends is lost. It is restarted alone with GOSSAMER_REJOIN=1, at most job.max_restarts times;
    the others continue. An error of a worker ends the run. So does the loss of all workers or, without servers, of the
    last worker that has the parameters. A server that ends is replaced by a standby process at the same address with
    the same journal, at most SERVER_RESTARTS times.

    Args:
        job, directory, show, note, tick: see `launch`.
        serving: number, commands and endpoints of the servers.

    Raises:
        PeerLost: a server failed at its start, or too often.
        ConnectError: the store or the servers cannot listen.
    """
    require(job.nodes == 1, "runs with servers or pairwise gossip start all workers on one machine: nodes must be 1")
    store, store_endpoint = serve_store(serving.store_endpoint or f"{_host(job)}:0", serving.network)
    endpoints = serving.endpoints or free_endpoints(_host(job), serving.servers)
    token = check_token_file(job.token_file) if job.token_file else make_token_file(directory)
    environment = _shared_environment(job, directory, store_endpoint, endpoints, token)
    trains, exited = partial(worker_registry.trains, store), partial(worker_registry.mark_exited, store)
    supervisor = Supervisor(RunFiles(directory), job.grace_seconds, note, tick)
    servers = Servers(job, serving, supervisor, environment, job.workers)
    try:
        return supervisor.run(ServedRun(job, supervisor, servers, environment, trains, exited, show))
    finally:
        del store, trains, exited  # no process uses the store any more


class ServedRun(RestartOne[ManagedProcess]):
    """The workers of the run, by rank. A lost one is restarted at once.

    trains(rank, attempt): whether this start of a worker has parameters that another could receive. exited(rank):
    called when a worker has ended and is not restarted.
    """

    def __init__(
        self,
        job: Job,
        supervisor: Supervisor,
        servers: Servers,
        environment: Mapping[str, str],
        trains: Callable[[int, int], bool],
        exited: Callable[[int], None],
        show: Show,
    ) -> None:
        super().__init__(supervisor.note)
        self._servers, self._trains, self._exited = servers, trains, exited
        self._standby = supervisor.standby("spare-worker", job.standby_command, environment, job.begin)
        self.workers = [
            supervisor.add(_worker(job, rank, supervisor, environment, show, self._standby.take))
            for rank in range(job.workers)
        ]

    def begin(self) -> None:
        self._servers.start()
        for worker in self.workers:
            self._start(worker)

    def look(self, now: float) -> bool:
        for worker in self.workers:
            if (exit_code := worker.ended()) is not None:
                self._worker_ended(worker, exit_code, now)
        ends = bool(self._finished or self.failed)
        self._servers.look(self.workers, ends=ends)
        self._standby.look(self.workers, ends=ends)
        return not self.failed and any(worker.lives for worker in self.workers)

    def outcome(self, stopped: Mapping[int, int]) -> Outcome:
        """A lost worker is the cause only if all workers were lost."""
        if not self.failed:
            return Outcome(
                failure=self._all_lost() if self._lost and not self._finished else None, restarts=self.restarts
            )
        return Outcome(
            failure=cause([*self.failed, *failures_of_stopped(self.workers, stopped)]), restarts=self.restarts
        )

    def _worker_ended(self, worker: ManagedProcess, exit_code: int, now: float) -> None:
        if not exit_code:
            self._finished.add(worker.number)
        else:
            self._worker_failed(worker, worker.failure(exit_code), now)
            self._start_due(now)
        if not worker.lives:
            self._exited(worker.number)

    def _is_fatal(self, worker: ManagedProcess, failure: Failure) -> bool:
        return failure.exit_code > 0

    @property
    def _is_stranding(self) -> bool:
        """Whether no remaining worker has parameters: each waits for the lost one, or was restarted itself."""
        left = [worker for worker in self.workers if worker.lives]
        if self._servers.count or self._finished or not left:
            return False
        return not any(self._trains(worker.number, worker.attempt) for worker in left)

    @property
    def _has_way_back(self) -> bool:
        """Whether servers have the parameters, or other workers are running and none has finished."""
        return self._servers.count > 0 or (not self._finished and any(worker.lives for worker in self.workers))

    def _delay(self, worker: ManagedProcess) -> float:
        worker.budget.take(worker.age_seconds)
        return 0.0

    def _note_loss(self, worker: ManagedProcess, failure: Failure, wait_seconds: float | None) -> None:
        lost = f"rank {worker.number} was lost ({failure.ending})"
        if wait_seconds is not None:
            attempt = f"{worker.budget.taken} of at most {worker.budget.most}"
            self._note(f"{lost}. Restarting it alone ({attempt}).")
            return
        left = sum(other.lives for other in self.workers)
        going = {0: "No worker is left to train", 1: "The other one continues"}.get(left, f"The other {left} continue")
        self._note(f"{lost}. {going}.")


class Servers:
    """The servers of a run and their standbys. Their process numbers begin with `first_number`."""

    def __init__(
        self,
        job: Job,
        serving: Serving,
        supervisor: Supervisor,
        environment: Mapping[str, str],
        first_number: int,
    ) -> None:
        self._job, self._supervisor, self._first_number = job, supervisor, first_number
        self._endpoints = environment["GOSSAMER_SERVERS"].split(",")
        command = serving.standby if serving.servers else ()
        self._standby = supervisor.standby(f"spare-{first_number}", command, environment)
        self._processes = [
            supervisor.add_server(self._server(server, serving.command, environment))
            for server in range(serving.servers)
        ]

    @property
    def count(self) -> int:
        return len(self._processes)

    def start(self) -> None:
        for process in self._processes:
            process.start()

    def look(self, workers: Sequence[ManagedProcess], *, ends: bool) -> None:
        """Restart servers that have ended, and prepare for the next loss once these workers train.

        ends: whether the run ends soon. Raises PeerLost if a restart cannot help.
        """
        for server, process in enumerate(self._processes):
            if (exit_code := process.ended()) is not None:
                self._ended(server, process, exit_code)
        self._standby.look(workers, ends=ends)

    def _ended(self, server: int, process: ManagedProcess, exit_code: int) -> None:
        end = from_exit(process.number, exit_code, time.time(), stopped=False)
        process.log.note(f"# server {server} ended with {end.ending}")
        log = server_log_path(self._job.logs, server)
        if exit_code > 0 and process.age_seconds < SETTLED_SECONDS:
            raise PeerLost(
                f"Server {server} failed at its start ({end.ending}) and would fail again. Its parameters are not "
                f"available, so all workers were stopped. Its own message is above and in {log}"
            )
        if process.budget.exhausted:
            raise PeerLost(
                f"Server {server} ended {process.attempt + 1} times, the last time with {end.ending}, so all workers "
                f"were stopped. Its log is {log}. If memory ran out, use more servers: --servers "
                f"{self.count + 1}"
            )
        process.budget.take(process.age_seconds)
        self._supervisor.note(
            f"server {server} ended with {end.ending}. Restarting it at {self._endpoints[server]} with its journal "
            f"({process.budget.taken} of at most {process.budget.most})."
        )
        process.start()

    def _server(self, server: int, command: Sequence[str], shared_environment: Mapping[str, str]) -> ManagedProcess:
        job, files, number = self._job, self._supervisor.files, self._first_number + server
        journal = files.directory / f"journal-{server}"
        journal.mkdir(mode=0o700)
        environment = {
            **shared_environment,
            "GOSSAMER_SERVER": str(server),
            "GOSSAMER_JOURNAL": str(journal),
            **job.host(number),
        }
        return ManagedProcess(
            number,
            files,
            self._supervisor.orphan_reaper,
            command,
            lambda attempt: environment,
            ServerLog(server, number, files, job.logs, command, self._supervisor.note),
            SERVER_RESTARTS,
            begin=self._standby.take,
        )


def _worker(
    job: Job, rank: int, supervisor: Supervisor, shared_environment: Mapping[str, str], show: Show, begin: Spawn
) -> ManagedProcess:
    def environment(attempt: int) -> Mapping[str, str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        return {**shared_environment, **place, **job.host(rank), **({"GOSSAMER_REJOIN": "1"} if attempt else {})}

    return ManagedProcess(
        rank,
        supervisor.files,
        supervisor.orphan_reaper,
        (sys.executable, *job.worker_arguments),
        environment,
        WorkerLog(job, rank, supervisor.files, show),
        job.max_restarts,
        begin,
    )


def _host(job: Job) -> str:
    if job.interface is None:
        return LOOPBACK
    address = interfaces().get(job.interface)
    if address is None:
        raise ConnectError(
            f"{job.interface} has no IPv4 address, so servers cannot listen there. Name another: --interface NAME"
        )
    return address


def _shared_environment(
    job: Job, directory: Path, store_endpoint: str, endpoints: Sequence[str], token: Path
) -> Mapping[str, str]:
    """Environment of all processes of this run. It contains the path of the token file, not the secret."""
    address, _, port = store_endpoint.rpartition(":")
    return inherited() | job.environment(directory) | {
        "WORLD_SIZE": str(job.workers),
        "LOCAL_WORLD_SIZE": str(job.workers),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GOSSAMER_RUN": secrets.token_hex(8),
        "GOSSAMER_REGISTRY": "1",
        "GOSSAMER_SERVERS": ",".join(endpoints),
        "GOSSAMER_TOKEN_FILE": str(token),
    }  # fmt: skip


def free_endpoints(host: str, count: int) -> tuple[str, ...]:
    """Different endpoints at `host` with free ports, as HOST:PORT."""
    candidates = random.SystemRandom().sample(PORTS, len(PORTS))
    return tuple(islice((f"{host}:{port}" for port in candidates if _is_free(host, port)), count))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as problem:
            if problem.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise ConnectError(
                f"Servers cannot listen at {host} ({problem}). Name another interface: --interface NAME"
            ) from None
    return True
