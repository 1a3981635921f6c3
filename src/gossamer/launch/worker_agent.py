"""Worker agent: starts, watches and ends one machine's workers for PyTorch's elastic launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from gossamer.base.run_files import RunFiles, read_json
from gossamer.launch.agent_store import AgentRendezvous
from gossamer.launch.failure import Failure, from_exit, from_report
from gossamer.launch.job import Job
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.process import ManagedProcess, end_all
from gossamer.launch.stop_request import StopRequest, end_by_request

MONITOR_SECONDS = 0.1


class LauncherStopped(KeyboardInterrupt):
    """The launcher was asked to end, and no worker is left; no Exception, which the engine's barrier would swallow."""


class WorkerAgent(SimpleElasticAgent):
    """Rendezvous, ranks and restarts are PyTorch's; the processes are ManagedProcesses.

    So who ended before anyone was asked to is known for certain, whatever the machine is busy with, and workers that
    save are not ended because one of them was faster.

    begin(attempt): called before each start of all workers.
    """

    def __init__(
        self,
        job: Job,
        files: RunFiles,
        rendezvous: AgentRendezvous,
        orphan_reaper: OrphanReaper,
        stop: StopRequest,
        environment: Callable[[], Mapping[str, str]],
        begin: Callable[[int], None],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(
            WorkerSpec(
                role="gossamer",
                local_world_size=job.workers,
                rdzv_handler=rendezvous,
                entrypoint=sys.executable,
                max_restarts=job.max_restarts,
                monitor_interval=MONITOR_SECONDS,
            )
        )
        self._job, self._files, self._orphan_reaper = job, files, orphan_reaper
        self._stop, self._environment, self._begin, self._note = stop, environment, begin, note
        self._processes: list[ManagedProcess] = []
        self._ended: dict[int, tuple[int, float]] = {}  # exit code and moment by rank, of those that nobody asked
        self._stopped: dict[int, int] = {}  # exit code by rank, of those that were asked to end
        self.supervises = False  # whether there are workers, so that a request to stop is looked at here

    @property
    def attempt(self) -> int:
        return max((process.attempt for process in self._processes), default=0)

    def failures(self) -> list[Failure]:
        """Of this attempt's workers: what they reported, else what their exit codes say."""
        found = []
        for rank in self._job.local_ranks:
            report = read_json(self._files.failure(rank, self.attempt))
            exit_code, moment = self._ended.get(rank, (self._stopped.get(rank, 0), float("inf")))
            if report is not None:
                found.append(from_report(report))
            elif exit_code:
                found.append(from_exit(rank, exit_code, moment, stopped=rank not in self._ended))
        return found

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.supervises = True
        self._processes = self._processes or [self._process(worker_group, worker) for worker in worker_group.workers]
        self._begin(self._processes[0].attempt + 1)
        self._ended, self._stopped = {}, {}
        for process in self._processes:
            process.start()
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop:
            end_by_request(self._processes, self._stop, self._files, self._job.grace_seconds, self._note)
            raise LauncherStopped
        for process in self._processes:
            if (exit_code := process.ended()) is not None:
                self._ended[process.number] = exit_code, time.time()
        exit_codes = [exit_code for exit_code, _ in self._ended.values()]
        if any(exit_codes):
            return RunResult(WorkerState.FAILED)
        if len(exit_codes) == len(self._processes):
            self.supervises = False
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._ended))
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """On every way out; the engine's own `timeout` would be too long for workers that cannot go on."""
        self._stopped |= end_all(self._processes, hurried=self._stop.hurried)
        self.supervises = False

    def _process(self, worker_group: WorkerGroup, worker: Worker) -> ManagedProcess:
        def environment(attempt: int) -> Mapping[str, str]:
            again = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
            return {**os.environ, **self._place(worker_group, worker), **again, **self._environment()}

        command = (sys.executable, *self._job.worker_arguments)
        return ManagedProcess(
            worker.global_rank, self._files, self._orphan_reaper, command, environment, self._job.prefix
        )

    def _place(self, worker_group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """The variables by which PyTorch's launcher tells a worker its place."""
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "GROUP_RANK": str(worker_group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": worker_group.spec.role,
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(worker_group.spec.local_world_size),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_MAX_RESTARTS": str(worker_group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
