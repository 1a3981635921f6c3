"""Elastic launcher: runs a job's workers on this machine by PyTorch's own launcher; the loss of one ends all."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gossamer.environment.run_token import check_token_file, make_token_file
from gossamer.errors import ConnectError
from gossamer.launch.agent_store import BACKEND, RENDEZVOUS_SECONDS, AgentRendezvous
from gossamer.launch.failure import LOOK_SECONDS, REQUESTS, Failure, cause, from_exit, from_report
from gossamer.launch.failure import Outcome as Outcome
from gossamer.launch.job import NO_SERVERS, Job
from gossamer.launch.logs.follow import Follower, Show
from gossamer.launch.logs.run_files import RunFiles, read_json
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.peer_launcher import launch_peers
from gossamer.launch.periodic import PeriodicTask
from gossamer.launch.process import on_stop_signals
from gossamer.launch.reaper import Reaper
from gossamer.launch.rendezvous import reach

REAPER_SECONDS = 0.02
MONITOR_SECONDS = 0.2


class LauncherStopped(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch(
    job: Job,
    directory: Path,
    *,
    show: Show,
    note: Callable[[str], None],
    tick: Callable[[], None],
) -> Outcome:
    """Run `job` to its end. directory: private to this run, empty, and the caller's to remove.

    show(rank, line) gets every line the workers print, note(sentence) what the launcher has to say, tick() is
    called some twenty times a second in the same thread as `show`. Where workers may be lost one by one, they are
    started and watched one by one: see launch_peers.
    """
    if job.outlives_losses:
        return launch_peers(job, NO_SERVERS, directory, show=show, note=note, tick=tick)
    rendezvous = _rendezvous(job, note)
    with OrphanReaper(directory) as orphan_reaper:
        reaper = Reaper(RunFiles(directory), orphan_reaper=orphan_reaper)
        attempts = Attempts(job, RunFiles(directory), show, note, rendezvous, _token(job, directory), reaper)

        def look() -> None:
            attempts.follower.look()
            tick()

        try:
            with _quiet(), PeriodicTask(LOOK_SECONDS, look), PeriodicTask(REAPER_SECONDS, reaper.look):
                return _run(job, attempts, rendezvous)
        finally:
            attempts.close()


def _rendezvous(job: Job, note: Callable[[str], None]) -> AgentRendezvous:
    """Find a wrong address at once: the engine would wait for minutes, and say nothing."""
    if job.node_rank and job.rendezvous is not None:
        reach(job.rendezvous)
    rendezvous = AgentRendezvous(job)
    if job.nodes > 1 and not job.node_rank:
        others = "machine 1" if job.nodes == 2 else f"machines 1 to {job.nodes - 1}"
        note(f"waiting for {others} to come to {job.rendezvous}, {RENDEZVOUS_SECONDS // 60} minutes at most")
    return rendezvous


def _token(job: Job, directory: Path) -> Path | None:
    """The file of the run's secret, where all of its machines have the same."""
    if job.token_file is not None:
        return check_token_file(job.token_file)
    return make_token_file(directory) if job.nodes == 1 else None


def _run(job: Job, attempts: Attempts, rendezvous: AgentRendezvous) -> Outcome:
    def stop(number: int, frame: FrameType | None) -> None:
        attempts.reaper.request_stop()
        raise LauncherStopped(number)

    try:
        with on_stop_signals(stop):
            _rendezvous_and_run(job, attempts, rendezvous)
    except ChildFailedError as failed:
        exit_codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        return Outcome(failure=cause(attempts.failures(exit_codes)), restarts=attempts.number)
    except LauncherStopped as stopped:
        return Outcome(signal=stopped.number, restarts=attempts.number)
    finally:
        attempts.reaper.end()
    return Outcome(restarts=attempts.number)


def _rendezvous_and_run(job: Job, attempts: Attempts, rendezvous: AgentRendezvous) -> None:
    # `$` is the engine's sign for its own placeholders
    arguments = [argument.replace("$", "$$") for argument in job.worker_arguments]
    command = [*job.prefix, sys.executable, *arguments]
    try:
        elastic_launch(_config(job, attempts, rendezvous), command[0])(*command[1:])
    except DistError as problem:
        raise ConnectError(
            f"The {job.nodes} machines could not meet at {job.rendezvous} within {RENDEZVOUS_SECONDS} seconds "
            f"({str(problem).splitlines()[0]}). Start the same command on every machine, with "
            "--node-rank 0 on the one that has this address, and let its firewall pass the port."
        ) from problem


def _config(job: Job, attempts: Attempts, rendezvous: AgentRendezvous) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.workers,
        run_id="gossamer",
        rdzv_backend=BACKEND,
        rdzv_configs={"handler": rendezvous},
        max_restarts=job.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        signals_to_handle="SIGQUIT",  # the others are handled here
        logs_specs=attempts,
    )


@dataclass(eq=False)
class Attempts(LogsSpecs):
    """The current start of all workers. The engine announces each start by asking for its log files (`reify`)."""

    job: Job
    files: RunFiles
    show: Show  # gets every line the workers print
    note: Callable[[str], None]  # gets the launcher's own sentences
    rendezvous: AgentRendezvous
    token: Path | None  # the file of the secret by which this run's workers know each other
    reaper: Reaper
    number: int = 0  # of the current attempt
    follower: Follower = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self.follower = Follower(self.job, self.files, self.show)

    @property
    def root_log_dir(self) -> str:
        return str(self.files.directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if attempt:
            self._say_restart(attempt)
        self.number = attempt
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.reaper.begin(attempt, self.job.local_ranks)
        self.follower.begin(attempt)
        errors = {local: str(self.files.directory / f"engine-{attempt}-{rank}.json") for local, rank in ranks.items()}
        for local, env in envs.items():
            env |= self.job.environment(self.files.directory) | {"GOSSAMER_RUN": self.rendezvous.run}
            env |= {"GOSSAMER_TOKEN_FILE": str(self.token)} if self.token else {}
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(
            stdouts={local: str(self.files.output(rank, attempt)) for local, rank in ranks.items()},
            stderrs={local: str(self.files.boot(rank, attempt)) for local, rank in ranks.items()},
            error_files=errors,
        )

    def failures(self, exit_codes: Mapping[int, int]) -> list[Failure]:
        """The failures that this attempt's workers reported, else their exit codes; all are logged."""
        self.follower.drain()
        failures = list(self._failures(exit_codes))
        for failure in failures:
            self.follower.note(failure.rank, failure.traceback or str(failure))
        return failures

    def close(self) -> None:
        self.follower.drain()
        self.follower.close()

    def _failures(self, exit_codes: Mapping[int, int]) -> Iterator[Failure]:
        for rank in self.job.local_ranks:
            report = read_json(self.files.failure(rank, self.number))
            exit_code, moment = self.reaper.died.get(rank, (exit_codes.get(rank, 0), float("inf")))
            if report is not None:
                yield from_report(report)
            elif exit_code:
                yield from_exit(rank, exit_code, moment, self._was_stopped(rank, exit_code))

    def _was_stopped(self, rank: int, exit_code: int) -> bool:
        """Whether a worker was ended because of another: by the reaper, or by the engine, which asks all that are left
        to end once it has seen the end of one."""
        asked = -exit_code in REQUESTS and rank not in self.reaper.unprompted
        return asked or rank in self.reaper.killed

    def _say_restart(self, attempt: int) -> None:
        failures = self.failures({})
        why = cause(failures) if failures else "a worker failed"
        self.note(f"{why}. Restarting all workers ({attempt} of at most {self.job.max_restarts}).")


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
