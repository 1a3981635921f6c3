"""Fixed run: a fixed number of workers on one or several machines. The loss of one restarts all or ends the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gossamer.base.run_files import RunFiles
from gossamer.comm.environment.run_token import check_token_file, make_token_file
from gossamer.comm.environment.wait_timeout import timeout_seconds, waiting_for
from gossamer.comm.tls_contexts import SEAL
from gossamer.launcher.failure import Outcome
from gossamer.launcher.job import NO_SERVERS, SEALED, Job, inherited
from gossamer.launcher.process import ManagedProcess
from gossamer.launcher.process_logs import Show, WorkerLog
from gossamer.launcher.rendezvous import RUN_ID, MachineRendezvous, Met, ignore_peer, reach
from gossamer.launcher.restart_policy import RestartAll
from gossamer.launcher.served_run import launch_peers
from gossamer.launcher.supervisor import Supervisor

NO_TOKEN = "Programs that reach the rendezvous can still join: --token-file FILE, on all machines, rejects them"


def launch(
    job: Job,
    directory: Path,
    *,
    show: Show,
    note: Callable[[str], None],
    tick: Callable[[], None],
    met: Met = ignore_peer,
) -> Outcome:
    """Run `job` to its end.

    Workers of pairwise gossip are started and restarted one by one: see launch_peers. After Ctrl-C or SIGTERM, workers
    get job.grace_seconds to save and end; a second signal ends them at once.

    Args:
        job: the script, its processes and machines.
        directory: empty and private to this run; the caller removes it.
        show: called as show(rank, line) for every line that a worker prints.
        note: called with each message of the launcher.
        tick: called some twenty times a second in the same thread as `show`.
        met: called once as met(store, address) after the rendezvous of all machines.

    Returns:
        The outcome: success, the root failure, the signal, or the reason why it may be resumed.
    """
    if job.outlives_losses:
        return launch_peers(job, NO_SERVERS, directory, show=show, note=note, tick=tick)
    machines = _machines(job, note, met)
    supervisor = Supervisor(RunFiles(directory), job.grace_seconds, note, tick)
    job.logs.mkdir(parents=True, exist_ok=True)
    return supervisor.run(FixedRun(job, supervisor, machines, _token(job, directory), show))


def _machines(job: Job, note: Callable[[str], None], met: Met) -> MachineRendezvous:
    """Wait for machine 0, with progress messages; torch alone would wait for minutes without any."""
    if job.node_rank and job.rendezvous is not None:
        reach(job.rendezvous, timeout_seconds(), note)
    machines = MachineRendezvous(job, met)
    if job.nodes > 1 and not job.node_rank:
        others = "machine 1" if job.nodes == 2 else f"machines 1 to {job.nodes - 1}"
        note(f"waiting for {others} to connect to {job.rendezvous}, {waiting_for(timeout_seconds())}")
    return machines


def _token(job: Job, directory: Path) -> Path | None:
    """File of the run's secret; None if the machines of the run have no common one."""
    if job.token_file is not None:
        return check_token_file(job.token_file)
    return make_token_file(directory) if job.nodes == 1 else None


class FixedRun(RestartAll):
    """The workers of one machine. They start after the rendezvous; each machine restarts its own."""

    def __init__(
        self, job: Job, supervisor: Supervisor, machines: MachineRendezvous, token_file: Path | None, show: Show
    ) -> None:
        super().__init__(
            supervisor.workers,
            job.max_restarts,
            supervisor.end_workers,
            lambda: bool(supervisor.stop),
            supervisor.note,
        )
        self._job, self._supervisor, self._machines = job, supervisor, machines
        self._token_file, self._show = token_file, show

    def begin(self) -> None:
        if not self._supervisor.workers:
            with self._supervisor.waiting():
                self._machines.meet()
            if self._machines.seals and self._job.node_rank == 0:
                self._supervisor.note(SEALED if self._token_file else f"{SEALED}. {NO_TOKEN}")
            for local_rank in range(self._job.workers):
                self._supervisor.add(self._worker(local_rank))
        super().begin()

    def look(self, now: float) -> bool:
        goes_on = super().look(now)
        if not goes_on and not self.failed and not self._supervisor.stop:
            with self._supervisor.waiting():
                self._machines.wait_for_ends()
        return goes_on

    def _worker(self, local_rank: int) -> ManagedProcess:
        rank = self._machines.first_rank + local_rank
        secrets = {"GOSSAMER_TOKEN_FILE": str(self._token_file)} if self._token_file else {}
        if self._machines.seals:
            secrets[SEAL] = "1"
        files, machines = self._supervisor.files, self._machines

        def environment(attempt: int) -> Mapping[str, str]:
            return {
                **inherited(),
                **self._place(rank, local_rank),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                **self._job.environment(files.directory),
                **self._job.host(local_rank),
                "GOSSAMER_RUN": machines.run,
                **secrets,
            }

        return ManagedProcess(
            rank,
            files,
            self._supervisor.orphan_reaper,
            (sys.executable, *self._job.worker_arguments),
            environment,
            WorkerLog(self._job, rank, files, self._show),
            begin=self._job.begin,
        )

    def _place(self, rank: int, local_rank: int) -> dict[str, str]:
        """Environment variables of torchrun for this rank."""
        job, machines = self._job, self._machines
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(job.node_rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "gossamer",
            "WORLD_SIZE": str(machines.world),
            "LOCAL_WORLD_SIZE": str(job.workers),
            "GROUP_WORLD_SIZE": str(job.nodes),
            "ROLE_WORLD_SIZE": str(machines.world),
            "MASTER_ADDR": machines.host,
            "MASTER_PORT": str(machines.port),
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            "TORCHELASTIC_RUN_ID": RUN_ID,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
