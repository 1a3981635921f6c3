"""Worker of `gossamer run`: the launcher's worker with a recorder for its events."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gossamer import events
from gossamer.base.run_files import RUN_DIRECTORY, RunFiles, current_attempt
from gossamer.comm.environment.run_settings import HEADER_BYTES, restarts_alone
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.launcher import worker
from gossamer.launcher.stack_dumps import DumpOnSignal
from gossamer.launcher.startup import StageMarks
from gossamer.observe.aside_log import Aside
from gossamer.observe.event_log import Recorder
from gossamer.observe.target import TargetWatch, read_target

UNTIL, SECONDS = "GOSSAMER_UNTIL", "GOSSAMER_SECONDS"


def main() -> None:
    if not worker.wait_for_place():
        return
    directory, rank = Path(os.environ[RUN_DIRECTORY]), int(os.environ["RANK"])
    recorder = Recorder(
        directory,
        rank,
        steps_live=os.environ["LOCAL_RANK"] == "0" or _others_report(),
        interface_bytes=_counter(os.environ.get(HEADER_BYTES)),
    )
    aside = Aside(directory, rank)
    events.subscribe(recorder, takes_samples=True)
    events.subscribe(StageMarks(RunFiles(directory), rank, current_attempt()), takes_steps=False)
    stacks = DumpOnSignal(RunFiles(directory), rank)
    events.subscribe(stacks)
    _watch_for_the_end(rank)
    if os.environ.get("GOSSAMER_AS_HOROVOD") == "1":
        from gossamer.horovod.alias import install

        install()

    def finish(failed: bool) -> None:
        recorder.close(failed)
        stacks.close()
        aside.close()

    worker.main(finish=finish)


def _others_report() -> bool:
    """Whether rank 0 may be lost while others continue."""
    return restarts_alone() or "GOSSAMER_ELASTIC" in os.environ


def _counter(header_bytes: str | None) -> Callable[[], int] | None:
    """A counter of the bytes that this worker's emulated host has sent; None without one."""
    if header_bytes is None:
        return None
    from gossamer.plan.emulation.namespaces import sent_bytes  # most runs have no emulated network, and start sooner

    return partial(sent_bytes, int(header_bytes))


def _watch_for_the_end(rank: int) -> None:
    """Let rank 0 stop all ranks when a target is reached or the time is over."""
    target, seconds = os.environ.get(UNTIL), os.environ.get(SECONDS)
    if rank == 0 and (target or seconds):
        events.subscribe(
            TargetWatch(read_target(target) if target else None, float(seconds) if seconds else None, _ask_to_stop)
        )


def _ask_to_stop() -> None:
    for session in open_sessions():
        session.request_stop()


if __name__ == "__main__":
    main()
