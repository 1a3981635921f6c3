"""Join progress: what a rank says while others have not come to gossamer.init()."""

from __future__ import annotations

import time
from collections.abc import Callable

from gossamer.comm.environment.join_errors import likely_cause
from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.comm.environment.meeting_server import MeetingServer
from gossamer.comm.environment.wait_progress import Missing, WaitProgress, named_ranks

NOT_COME = (
    "Such a rank still imports or loads, waits in a queue, was not started or has failed: look at its own output."
)


class JoinProgress:
    """Rank 0 says who is missing; while it is missing itself, one rank of each machine does."""

    def __init__(
        self,
        job: JobEnvironment,
        seconds: float,
        server: MeetingServer | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._server = job, server
        self._progress = WaitProgress(job.rank, "gossamer.init()", seconds, clock=clock)
        # Where rank 0 should be on this machine, rank 1 is, too
        self._speaks = job.local_rank == 0 or job.rank == 1

    def for_rank_0(self, problem: OSError) -> None:
        """Rank 0 cannot be reached, for now."""
        found = Missing(f"rank 0 of {self._job.world}", f"No connection to it ({problem}). {likely_cause(problem)}")
        self._progress.look(lambda: found if self._speaks else None)

    def for_all(self, topic: str) -> Callable[[], None]:
        """To be called while ranks are waited for that have said nothing on this topic."""
        return lambda: self._progress.look(lambda: self._missing(topic))

    def _missing(self, topic: str) -> Missing | None:
        if self._server is None or not (ranks := self._server.missing(topic)):
            return None
        return Missing(f"{named_ranks(ranks)} of {self._job.world}", NOT_COME)

    def end(self) -> None:
        self._progress.end()
