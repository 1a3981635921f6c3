"""Member launcher: runs a job whose workers come and go while the others train on, with its coordinator."""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from gossamer.base.peer_ops import Answer, Ask
from gossamer.base.run_files import RunFiles
from gossamer.comm.environment.network_interfaces import interface_towards
from gossamer.comm.environment.run_settings import tls_contexts
from gossamer.comm.environment.run_token import check_token_file, make_token_file
from gossamer.comm.environment.wait_timeout import timeout_seconds
from gossamer.comm.rpc.sockets import Tls
from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS, handling
from gossamer.errors import require
from gossamer.launch.coordinator_link import CoordinatorLink, RemoteCoordinator, RunCard
from gossamer.launch.crew import Crew, CrewOrders
from gossamer.launch.delayed_notes import DelayedNotes
from gossamer.launch.failure import LOOK_SECONDS, Outcome
from gossamer.launch.job import Job
from gossamer.launch.local_coordinator import LocalCoordinator, check_joinable
from gossamer.launch.logs.follow import Show
from gossamer.launch.member_process import MemberProcess
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.periodic import PeriodicTask
from gossamer.launch.process import POLL_SECONDS, ManagedProcess, end_all
from gossamer.launch.rendezvous import in_namespace
from gossamer.launch.stop_request import StopRequest, end_by_request
from gossamer.launch.worker_range import WorkerRange

LOOPBACK = "127.0.0.1"
JOURNAL = "coordinator-journal"
NO_WAY_BACK = (
    "a launcher that is killed takes this run along: start it with --listen HOST:PORT and --token-file FILE, and the "
    "same command continues the run with the workers of other machines"
)
# Variables of runs with a fixed number of workers, which an outer launcher may have set
FOREIGN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("GOSSAMER_SERVERS", "GOSSAMER_SERVER", "GOSSAMER_JOURNAL", "GOSSAMER_REJOIN", "GOSSAMER_REGISTRY"),
)


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """An elastic run as one of its launchers sees it, beside a Job, whose `workers` are those that it begins with.

    listen: where this launcher's coordinator listens, port 0 for any free one; coordinator: where another launcher's
    does, to be joined. One of the two. network: the file of the network namespace to listen in, None for this process's
    own.
    """

    range: WorkerRange
    listen: tuple[str, int] | None = (LOOPBACK, 0)
    coordinator: tuple[str, int] | None = None
    network: Path | None = None

    def __post_init__(self) -> None:
        require((self.listen is None) != (self.coordinator is None), "a launcher has a coordinator, or joins one")


Staffed = Callable[[int, int], None]
Coordinate = Callable[[Job, Elasticity, Path, Path, Callable[[str], None]], CoordinatorLink]


def coordinate_run(
    job: Job,
    elasticity: Elasticity,
    token_file: Path,
    directory: Path,
    note: Callable[[str], None],
    beside: Mapping[str, Callable[[Ask], Answer]] | None = None,
) -> CoordinatorLink:
    """This launcher's coordinator; or the other launcher's, found to be there. Raises ConnectError within two seconds
    where the port is taken, nobody answers, or who does has another token. beside: as CoordinatorServer's."""
    token = hashlib.sha256(token_file.read_bytes()).digest()
    folder = job.settings.get("GOSSAMER_TLS")
    tls = Tls(*tls_contexts(folder)) if folder else None
    if elasticity.coordinator is not None:
        check_joinable(elasticity.coordinator, token, tls)
        return RemoteCoordinator(elasticity.coordinator)
    assert elasticity.listen is not None
    journal = journal_path(job, elasticity, token) or directory / JOURNAL
    serve = partial(LocalCoordinator, elasticity.range, elasticity.listen, token, journal, note, tls, beside)
    return serve() if elasticity.network is None else in_namespace(elasticity.network, serve)


def journal_path(job: Job, elasticity: Elasticity, token: bytes) -> Path | None:
    """Where the coordinator's journal is, as the same command finds it again; None where workers of other launchers
    would not find a coordinator that is started again, since its port or its token are made for one start.

    It is next to the folder of logs, since the default folder has another name in each start; where that place is not
    writable, it is in the folder. Its name is a hash of the address and the token.
    """
    emulated = elasticity.network is not None  # where all workers are this launcher's
    if job.token_file is None or elasticity.listen is None or not elasticity.listen[1] or emulated:
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
    staffed: Staffed = lambda workers, places: None,
    coordinate: Coordinate = coordinate_run,
) -> Outcome:
    """Run `job` until no worker is left, by the rules of `Crew`; arguments as `launch` has them. Call in the main
    thread.

    staffed(workers, places) is called when another number of workers trains, or has had places on this machine.
    coordinate: starts or finds the coordinator. Asked to stop, the launcher beside the coordinator lets all workers
    save and end; one that joined lets its own leave.
    """
    token_file = check_token_file(job.token_file) if job.token_file else make_token_file(directory)
    delayed = DelayedNotes(note)
    coordinator = coordinate(job, elasticity, token_file, directory, delayed)
    card: Path | None = None
    try:
        coordinator.settle(note)
        launch = MemberLaunch(job, elasticity, directory, coordinator, token_file, show, note, delayed, staffed)
        card = RunCard(coordinator.address, token_file).write(job.logs) if launch.leads else None
        if launch.leads and elasticity.network is None and not coordinator.address[0].startswith("127."):
            note(f"workers on other machines join by: {launch.join_command}")
            if journal_path(job, elasticity, b"") is None:
                note(NO_WAY_BACK)
        return launch.run(tick)
    finally:
        if card is not None:
            card.unlink(missing_ok=True)
        coordinator.close()


class MemberLaunch:
    """One launcher's part of an elastic run: its crew, their processes, and how they end."""

    def __init__(
        self,
        job: Job,
        elasticity: Elasticity,
        directory: Path,
        coordinator: CoordinatorLink,
        token_file: Path,
        show: Show,
        note: Callable[[str], None],
        delayed: DelayedNotes,
        staffed: Staffed,
    ) -> None:
        self.leads = elasticity.coordinator is None
        self._job = _towards(job, coordinator.address)
        self._files = RunFiles(directory)
        self._coordinator, self._token_file = coordinator, token_file
        self._show, self._note, self._delayed, self._staffed = show, note, delayed, staffed
        self._stop = StopRequest()
        self._orphan_reaper = OrphanReaper(directory)
        self._environment = self._shared_environment(str(elasticity.range))
        self._workers: list[MemberProcess] = []
        orders = CrewOrders(
            initial=job.workers,
            least=elasticity.range.least,
            patience_seconds=timeout_seconds(),
            linger_seconds=job.grace_seconds,
            join_command=self.join_command if self.leads else None,
            logs=job.logs,
        )
        self._crew = Crew(orders, self._hire, coordinator, note)

    @property
    def join_command(self) -> str:
        """What starts one more worker, also on another machine, which has a copy of the token."""
        host, port = self._coordinator.address
        words = ["gossamer", "run", "--join", f"{host}:{port}", "--token-file", str(self._token_file)]
        settings = self._job.settings
        alike = {
            "--recipe": self._job.recipe,
            "--collective": settings.get("GOSSAMER_COLLECTIVE"),
            "--tls": settings.get("GOSSAMER_TLS"),
        }
        options = [word for option, value in alike.items() if value for word in (option, value)]
        return f"{shlex.join([*words, '--workers', '1', *options])} {self._job.command}"

    def run(self, tick: Callable[[], None]) -> Outcome:
        def look() -> None:
            for worker in tuple(self._workers):
                worker.log.look()
            tick()

        with handling(self._on_signal, *STOP_SIGNALS), self._orphan_reaper:
            try:
                with PeriodicTask(LOOK_SECONDS, look):
                    return self._supervise()
            finally:
                for worker in self._workers:
                    worker.log.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """At once, since whoever signals all processes of a job signals the workers, too, who look for this file."""
        if self.leads:
            self._files.stopping.touch()
        self._stop(number, frame)

    def _supervise(self) -> Outcome:
        crew, stop, said = self._crew, self._stop, (-1, -1)
        try:
            crew.begin()
            while not stop and crew.look(time.monotonic()):
                self._delayed.look(time.monotonic(), lambda: crew.is_finishing)
                if said != (now := (crew.training, len(self._workers))):
                    said = now
                    self._staffed(*said)
                time.sleep(POLL_SECONDS)
            self._ask_to_end()
        finally:
            end_all(self._processes, hurried=stop.hurried)
        outcome = crew.outcome()
        return Outcome(signal=stop.number, restarts=outcome.restarts) if stop and not crew.failed else outcome

    @property
    def _processes(self) -> list[ManagedProcess]:
        return [worker.process for worker in self._workers]

    def _ask_to_end(self) -> None:
        """Where the run is to end before it has finished, let workers save; or leave, where it goes on elsewhere."""
        stop, grace_seconds = self._stop, self._job.grace_seconds
        if stop and self.leads:
            end_by_request(self._processes, stop, self._files, grace_seconds, self._note)
        elif stop:
            self._note(f"leaving the run, which goes on; the workers here have up to {grace_seconds:g} s for that")
            end_all(self._processes, grace_seconds, hurried=stop.hurried)
        elif self._crew.in_vain:
            self._files.stopping.touch()
            end_all(self._processes, grace_seconds, hurried=stop.hurried)

    def _hire(self, place: int, initial: bool) -> MemberProcess:
        worker = MemberProcess(
            self._job, place, self._files, self._orphan_reaper, self._environment, self._show, initial=initial
        )
        self._workers.append(worker)
        return worker

    def _shared_environment(self, range_: str) -> Mapping[str, str]:
        """The environment that all workers share. Of the secret it holds the path only."""
        host, port = self._coordinator.address
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        name = hashlib.sha256(b"name of the run" + self._token_file.read_bytes()).hexdigest()
        added = self._job.environment(self._files.directory)
        return inherited | {name: value for name, value in added.items() if name not in FOREIGN} | {
            "GOSSAMER_COORDINATOR": f"{host}:{port}",
            "GOSSAMER_ELASTIC": range_,
            "GOSSAMER_RUN": name[:16],  # alike wherever the run's workers are started
            "GOSSAMER_TOKEN_FILE": str(self._token_file),
        }  # fmt: skip


def _towards(job: Job, address: tuple[str, int]) -> Job:
    """The same job with the interface towards its coordinator, by which its workers listen for each other."""
    if job.interface is not None or address[0].startswith("127."):
        return job
    return replace(job, interface=interface_towards(address[0]))
