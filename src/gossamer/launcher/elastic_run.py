"""Elastic run: a job whose workers join and leave while the others train, with its coordinator."""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from gossamer.base.host_port import is_loopback
from gossamer.base.peer_ops import Answer, Ask
from gossamer.base.run_files import RunFiles, Stage, read_json
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.relay import RelayServer
from gossamer.comm.environment.emulated_host import in_namespace
from gossamer.comm.environment.network_interfaces import interface_towards
from gossamer.comm.environment.run_token import check_token_file, make_token_file, read_token, write_secret
from gossamer.comm.environment.wait_timeout import timeout_seconds
from gossamer.comm.membership.invitations import Welcome
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.comm.tls_contexts import tls_contexts
from gossamer.launcher.coordinator import CoordinatorLink, LocalCoordinator, RemoteCoordinator, RunCard, joinable_run
from gossamer.launcher.elastic_policy import ElasticOrders, ElasticPolicy
from gossamer.launcher.failure import Outcome
from gossamer.launcher.job import MOST_WORKERS, NO_SERVERS, SEALED, Elasticity, Job, Serving, Spawn, inherited
from gossamer.launcher.process import ManagedProcess
from gossamer.launcher.process_logs import Show, WorkerLog
from gossamer.launcher.served_run import Servers, free_endpoints
from gossamer.launcher.supervisor import Supervisor

JOURNAL, INVITATION = "coordinator-journal", "invitation"  # names of files
INVITED = "to add workers from another machine, copy {path} to it and write there: gossamer join @{file} {program}"
NOTE_DELAY_SECONDS = 1.0
ENDS_HERE = "if this launcher is killed, the run ends"
NO_WAY_BACK = (
    f"{ENDS_HERE}. With --listen HOST:PORT and --token-file FILE, the same command would continue the run with the "
    "workers of other machines"
)
# Variables of runs with a fixed number of workers; an outer launcher may have set them
FOREIGN = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "GOSSAMER_SERVERS"),
)


Staffed = Callable[[int, int], None]
Coordinate = Callable[[Job, Elasticity, Path, Path, Callable[[str], None]], CoordinatorLink]


def coordinate_run(
    job: Job,
    elasticity: Elasticity,
    token_file: Path,
    directory: Path,
    note: Callable[[str], None],
    more_handlers: Mapping[str, Callable[[Ask], Answer]] | None = None,
) -> CoordinatorLink:
    """Start the coordinator of this launcher, or check that another launcher's is reachable (--join).

    `more_handlers`: additional request handlers, see CoordinatorServer.

    Raises:
        ConnectError: within two seconds, if the port is in use, no coordinator answers, or it has another token.
    """
    token = read_token(token_file)
    tls = tls_contexts(job.settings.get("GOSSAMER_TLS"))
    if elasticity.coordinator is not None:
        run = joinable_run(elasticity.coordinator, token, tls)
        if not elasticity.relays:
            return RemoteCoordinator(elasticity.coordinator, run)
        assert elasticity.listen is not None
        public = elasticity.invitation.addresses
        relay = RelayServer(elasticity.coordinator, token, elasticity.listen, public, note)
        return RemoteCoordinator(elasticity.coordinator, run, relay)
    assert elasticity.listen is not None
    journal = journal_path(job, elasticity, token) or directory / JOURNAL
    welcome = Welcome(
        token=token_file.read_bytes(),
        addresses=elasticity.invitation.addresses,
        settings={name: value for name, value in _shared_options(job).items() if value},
        encrypted=tls is not None,
    )
    options = CoordinatorOptions(
        least=elasticity.range.least,
        most=elasticity.range.most,
        initial=elasticity.range.initial,
        relays=elasticity.relays,
        seals=elasticity.seals,
        servers=elasticity.servers,
    )
    serve = partial(
        CoordinatorServer, options, token=token, note=note, tls=tls, more_handlers=more_handlers, welcome=welcome
    )
    start = partial(LocalCoordinator, serve, elasticity.listen, journal)
    return start() if elasticity.network is None else in_namespace(elasticity.network, start)


def journal_path(job: Job, elasticity: Elasticity, token: bytes) -> Path | None:
    """Path of the coordinator's journal, the same for every start of this command.

    None if a restarted coordinator could not be found by workers of other launchers, since its port or its token would
    differ in each start; or if the run has servers, which end with their launcher. The journal is next to the folder of
    logs, since the default folder has another name in each start; if that place is not writable, it is in the folder.
    Its name is a hash of the address and the token.
    """
    emulated = elasticity.network is not None  # then this launcher has all workers
    if (
        job.token_file is None
        or elasticity.listen is None
        or not elasticity.listen[1]
        or emulated
        or elasticity.servers
    ):
        return None
    host, port = elasticity.listen
    name = hashlib.sha256(b"journal" + token + f"{host}:{port}".encode()).hexdigest()[:16]
    logs = job.logs.absolute()
    return (logs.parent if os.access(logs.parent, os.W_OK) else logs) / f".{JOURNAL}-{name}"


def launch_members(
    job: Job,
    elasticity: Elasticity,
    directory: Path,
    *,
    show: Show,
    note: Callable[[str], None],
    tick: Callable[[], None],
    serving: Serving = NO_SERVERS,
    staffed: Staffed = lambda workers, places: None,
    coordinate: Coordinate = coordinate_run,
    show_secret: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run `job` until no worker is left, by the rules of `ElasticPolicy`. Call it in the main thread.

    A request to stop ends the run if this launcher has the coordinator: all workers save and end. If it joined another
    launcher's run, only its own workers leave.

    Args:
        job, directory, show, note, tick: see `launch`.
        elasticity: range of workers and the coordinator's address.
        serving: the run's parameter servers, which this launcher starts; workers learn their addresses from the
            coordinator.
        staffed: called with (workers, slots) when the number of training workers, or of this machine's slots, changes.
        coordinate: starts or finds the coordinator.
        show_secret: shows the link of the run, which must not be recorded.
    """
    token_file = check_token_file(job.token_file) if job.token_file else make_token_file(directory)
    delayed = DelayedNotes(note)
    if serving.servers:
        assert elasticity.listen is not None  # only the first launcher starts servers
        endpoints = serving.endpoints or server_endpoints(*elasticity.listen, serving.servers)
        serving, elasticity = replace(serving, endpoints=endpoints), replace(elasticity, servers=endpoints)
    coordinator = coordinate(job, elasticity, token_file, directory, delayed)
    written: list[Path] = []
    try:
        coordinator.settle(note)
        leads = elasticity.coordinator is None
        supervisor = Supervisor(RunFiles(directory), job.grace_seconds, note, tick)
        join_command = _join_command(job, coordinator.address, token_file) if leads else None
        orders = ElasticOrders(
            initial=job.workers,
            least=elasticity.range.least,
            patience_seconds=timeout_seconds(),
            linger_seconds=job.grace_seconds,
            join_command=join_command,
            logs=job.logs,
            served=serving.servers > 0,
        )
        run = ElasticRun(job, elasticity, orders, supervisor, coordinator, token_file, show, delayed, staffed, serving)
        if leads:
            written.append(RunCard(coordinator.address, token_file).write(job.logs))
            written += _invite(job, elasticity, coordinator, note, show_secret)
            if elasticity.seals:
                note(SEALED)
        return supervisor.run(run)
    finally:
        for path in written:
            path.unlink(missing_ok=True)
        coordinator.close()


def _invite(
    job: Job,
    elasticity: Elasticity,
    coordinator: CoordinatorLink,
    note: Callable[[str], None],
    show_secret: Callable[[str], None],
) -> list[Path]:
    """Make the link of a run that other machines can join. Returns its file, or nothing for any other run."""
    options = elasticity.invitation
    is_reachable = elasticity.network is None and not is_loopback(coordinator.address[0])
    if not (is_reachable or options.file or options.addresses):
        return []
    link = coordinator.invite(options.lifetime_seconds, options.uses)
    path = options.file or job.logs / INVITATION
    write_secret(path, link)
    note(INVITED.format(path=path, file=path.name, program=job.command))
    show_secret(link)
    if journal_path(job, elasticity, b"") is None:
        note(ENDS_HERE if elasticity.servers else NO_WAY_BACK)
    return [path]


class ElasticRun(ElasticPolicy["MemberProcess"]):
    """One launcher's part of an elastic run: the policy together with its processes."""

    def __init__(
        self,
        job: Job,
        elasticity: Elasticity,
        orders: ElasticOrders,
        supervisor: Supervisor,
        coordinator: CoordinatorLink,
        token_file: Path,
        show: Show,
        delayed: DelayedNotes,
        staffed: Staffed,
        serving: Serving,
    ) -> None:
        super().__init__(orders, self._add_worker, coordinator, supervisor.note)
        self._job, self._supervisor, self._show = _towards(job, coordinator.address), supervisor, show
        self._delayed, self._staffed, self._reported_staff = delayed, staffed, (-1, -1)
        shared = _shared_environment(
            self._job, supervisor.files.directory, coordinator, str(elasticity.range), token_file
        )
        self._environment = {**shared, "GOSSAMER_RELAY": _relay(elasticity, coordinator)}
        self._standby = supervisor.standby(
            "spare-worker", self._job.standby_command, self._environment, self._job.begin
        )
        first_number = elasticity.range.most if job.hosts else MOST_WORKERS  # places of workers may be added later
        environment = {**self._environment, "GOSSAMER_SERVERS": ",".join(serving.endpoints)}
        self._servers = Servers(self._job, serving, supervisor, environment, first_number)

    def begin(self) -> None:
        self._servers.start()
        super().begin()

    def look(self, now: float) -> bool:
        goes_on = super().look(now)
        ends = self.is_finishing
        self._servers.look(self.workers, ends=ends)
        if goes_on:
            self._standby.look(self.workers, ends=ends)
            self._delayed.look(now, lambda: self.is_finishing)
            if self._reported_staff != (staff := (self.training, len(self.workers))):
                self._reported_staff = staff
                self._staffed(*staff)
        return goes_on

    def _add_worker(self, place: int, initial: bool) -> MemberProcess:
        process = MemberProcess(
            self._job, place, self._supervisor, self._environment, self._show, self._standby.take, initial=initial
        )
        return self._supervisor.add(process)


class MemberProcess(ManagedProcess):
    """One worker slot of this launcher. Each start is a new member with a new number. Implements ElasticWorker.

    shared_environment: variables that all workers have. begin: starts a process. initial: whether the first start is
    one of the run's first workers, which initialize the same parameters and receive none.
    """

    def __init__(
        self,
        job: Job,
        place: int,
        supervisor: Supervisor,
        shared_environment: Mapping[str, str],
        show: Show,
        begin: Spawn,
        *,
        initial: bool,
    ) -> None:
        self.members: list[int] = []
        self._initial, self._shared_environment, self._host = initial, shared_environment, job.host(place)
        super().__init__(
            place,
            supervisor.files,
            supervisor.orphan_reaper,
            (sys.executable, *job.worker_arguments),
            self._member_environment,
            WorkerLog(job, place, supervisor.files, show),
            job.max_restarts,
            begin,
        )

    @property
    def member(self) -> int:
        return self.members[-1]

    @property
    def attached(self) -> bool:
        return self.lives and self._files.has_reached(Stage.ATTACHED, self.number)

    @property
    def has_ever_attached(self) -> bool:
        return self._files.has_ever_reached(Stage.ATTACHED, self.number)

    @property
    def holds_state(self) -> bool:
        return self.attached or (self.lives and self._initial and self.attempt == 0)

    @property
    def has_left(self) -> bool:
        return self._files.has_reached(Stage.LEFT, self.number)

    @property
    def is_finishing(self) -> bool:
        finished = self.lives and self._files.finished(self.number, self.attempt).exists()
        return finished and not self.has_left

    @property
    def lost_residual(self) -> str:
        residual = read_json(self._files.residual(self.number, self.attempt))
        if not residual or not residual["norm"]:
            return ""
        return f"Its residual, of norm {residual['norm']:.3g} after step {residual['step']}, is lost with it"

    def start(self) -> None:
        self.members.append(secrets.randbits(63))
        super().start()

    def _member_environment(self, attempt: int) -> Mapping[str, str]:
        place = str(self.number)
        return {
            **self._shared_environment,
            **self._host,
            "RANK": place,
            "LOCAL_RANK": place,
            "GOSSAMER_PLACE": place,
            "GOSSAMER_MEMBER": str(self.member),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }


class DelayedNotes:
    """Delays the notes of a coordinator by a second and drops them if the run ends meanwhile.

    A coordinator sees connections close before the launcher knows that their workers have finished. Its threads call
    this object; the launcher's thread calls `look`.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._waiting: deque[tuple[float, str]] = deque()

    def __call__(self, text: str) -> None:
        self._waiting.append((time.monotonic(), text))

    def look(self, now: float, is_over: Callable[[], bool]) -> None:
        while self._waiting and self._waiting[0][0] <= now - NOTE_DELAY_SECONDS:
            if is_over():
                self._waiting.clear()
                return
            self._note(self._waiting.popleft()[1])


def server_endpoints(host: str, port: int, count: int) -> tuple[str, ...]:
    """Endpoints of servers: the ports after the coordinator's, so that a firewall can open them; or free ones, if that
    is any free port."""
    return tuple(f"{host}:{port + 1 + server}" for server in range(count)) if port else free_endpoints(host, count)


def _join_command(job: Job, address: tuple[str, int], token_file: Path) -> str:
    """The command that starts one more worker, also on another machine that has a copy of the token."""
    host, port = address
    words = ["gossamer", "run", "--join", f"{host}:{port}", "--token-file", str(token_file)]
    alike = {f"--{name}": value for name, value in _shared_options(job).items()}
    alike["--tls"] = job.settings.get("GOSSAMER_TLS")
    options = [word for option, value in alike.items() if value for word in (option, value)]
    return f"{shlex.join([*words, '--workers', '1', *options])} {job.command}"


def _shared_options(job: Job) -> Mapping[str, str | None]:
    """Options that all launchers of a run must have alike, by name; None if not given."""
    return {"recipe": job.recipe, "collective": job.settings.get("GOSSAMER_COLLECTIVE")}


def _shared_environment(
    job: Job, directory: Path, coordinator: CoordinatorLink, range_: str, token_file: Path
) -> Mapping[str, str]:
    """Environment of all workers. It contains the path of the token file, not the secret."""
    host, port = coordinator.address
    extended = inherited() | job.environment(directory)
    return {name: value for name, value in extended.items() if name not in FOREIGN} | {
        "GOSSAMER_COORDINATOR": f"{host}:{port}",
        "GOSSAMER_ELASTIC": range_,
        "GOSSAMER_RUN": coordinator.run[:16],
        "GOSSAMER_TOKEN_FILE": str(token_file),
    }  # fmt: skip


def _relay(elasticity: Elasticity, coordinator: CoordinatorLink) -> str:
    """The number of the relay on this machine, by which its workers recognize it; empty without one."""
    if isinstance(coordinator, RemoteCoordinator) and coordinator.relay is not None:
        return str(coordinator.relay.me.number)
    return str(COORDINATOR.number) if elasticity.relays else ""


def _towards(job: Job, address: tuple[str, int]) -> Job:
    """The job with the interface towards its coordinator, where its workers listen for each other."""
    if job.interface is not None or is_loopback(address[0]):
        return job
    return replace(job, interface=interface_towards(address[0]))
