"""Elastic launcher: runs a job's workers on this machine by PyTorch's own launcher; the loss of one ends all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed import DistError

from gossamer.base.run_files import RunFiles
from gossamer.comm.environment.run_token import check_token_file, make_token_file
from gossamer.comm.environment.wait_timeout import duration, timeout_seconds, waiting_for
from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS, handling
from gossamer.errors import ConnectError
from gossamer.launch.agent_store import AgentRendezvous, Met, nobody_asks
from gossamer.launch.failure import LOOK_SECONDS, Failure, cause
from gossamer.launch.failure import Outcome as Outcome
from gossamer.launch.job import NO_SERVERS, Job
from gossamer.launch.logs.follow import Follower, Show
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.peer_launcher import launch_peers
from gossamer.launch.periodic import PeriodicTask
from gossamer.launch.rendezvous import reach
from gossamer.launch.stop_request import StopRequest
from gossamer.launch.worker_agent import LauncherStopped, WorkerAgent


def launch(
    job: Job,
    directory: Path,
    *,
    show: Show,
    note: Callable[[str], None],
    tick: Callable[[], None],
    met: Met = nobody_asks,
) -> Outcome:
    """Run `job` to its end. directory: private to this run, empty, and the caller's to remove.

    show(rank, line) gets every line the workers print, note(sentence) what the launcher has to say, tick() is
    called some twenty times a second in the same thread as `show`; met(store, address) once, when the machines have
    met. Where workers may be lost one by one, they are
    started and watched one by one: see launch_peers. Asked to stop, by Ctrl-C or SIGTERM, it asks the workers and gives
    them job.grace_seconds; asked again, it ends them.
    """
    if job.outlives_losses:
        return launch_peers(job, NO_SERVERS, directory, show=show, note=note, tick=tick)
    rendezvous = _rendezvous(job, note, met)
    files = RunFiles(directory)
    follower = Follower(job, files, show)

    def look() -> None:
        follower.look()
        tick()

    try:
        with OrphanReaper(directory) as orphan_reaper:
            run = ElasticRun(job, files, rendezvous, orphan_reaper, follower, _token(job, directory), note)
            with _quiet(), PeriodicTask(LOOK_SECONDS, look):
                return run()
    finally:
        follower.close()


def _rendezvous(job: Job, note: Callable[[str], None], met: Met) -> AgentRendezvous:
    """Come to machine 0 and say how it goes: the engine would wait for minutes, and say nothing."""
    if job.node_rank and job.rendezvous is not None:
        reach(job.rendezvous, timeout_seconds(), note)
    rendezvous = AgentRendezvous(job, met)
    if job.nodes > 1 and not job.node_rank:
        others = "machine 1" if job.nodes == 2 else f"machines 1 to {job.nodes - 1}"
        note(f"waiting for {others} to come to {job.rendezvous}, {waiting_for(timeout_seconds())}")
    return rendezvous


def _token(job: Job, directory: Path) -> Path | None:
    """The file of the run's secret, where all of its machines have the same."""
    if job.token_file is not None:
        return check_token_file(job.token_file)
    return make_token_file(directory) if job.nodes == 1 else None


class ElasticRun:
    """All starts of a job's workers on this machine, with their logs."""

    def __init__(
        self,
        job: Job,
        files: RunFiles,
        rendezvous: AgentRendezvous,
        orphan_reaper: OrphanReaper,
        follower: Follower,
        token: Path | None,
        note: Callable[[str], None],
    ) -> None:
        self._job, self._files, self._rendezvous = job, files, rendezvous
        self._follower, self._token, self._note = follower, token, note
        self._stop = StopRequest()
        self._agent = WorkerAgent(
            job, files, rendezvous, orphan_reaper, self._stop, self._environment, self._begin, note
        )

    def __call__(self) -> Outcome:
        try:
            with handling(self._on_signal, *STOP_SIGNALS):
                failed = self._agent.run().is_failed()
        except LauncherStopped:
            return Outcome(signal=self._stop.number, restarts=self._agent.attempt)
        except DistError as problem:
            raise ConnectError(
                f"The {self._job.nodes} machines could not meet at {self._job.rendezvous} within "
                f"{duration(timeout_seconds())} ({str(problem).splitlines()[0]}). Start the same command on every "
                "machine, with --node-rank 0 on the one that has this address, and let its firewall pass the port."
            ) from problem
        return Outcome(failure=cause(self._logged_failures()) if failed else None, restarts=self._agent.attempt)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The agent looks at requests while it has workers; a rendezvous is interrupted."""
        self._stop(number)
        if not self._agent.supervises:
            raise LauncherStopped

    def _begin(self, attempt: int) -> None:
        if attempt:
            why = cause(self._logged_failures())
            self._note(f"{why}. Restarting all workers ({attempt} of at most {self._job.max_restarts}).")
        self._follower.begin(attempt)

    def _logged_failures(self) -> list[Failure]:
        self._follower.drain()
        failures = self._agent.failures()
        for failure in failures:
            self._follower.note(failure.rank, failure.traceback or str(failure))
        return failures

    def _environment(self) -> Mapping[str, str]:
        token = {"GOSSAMER_TOKEN_FILE": str(self._token)} if self._token else {}
        return {**self._job.environment(self._files.directory), "GOSSAMER_RUN": self._rendezvous.run, **token}


@contextmanager
def _quiet() -> Iterator[None]:
    """The engine's own log repeats what the closing message says."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence, before = logging.NullHandler(), logger.propagate
    logger.addHandler(silence)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silence)
