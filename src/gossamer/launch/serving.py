"""The servers of a run: how many, what they run, and where they are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import require

SERVER = (sys.executable, "-u", "-m", "gossamer.parameter_server")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """`servers` processes beside a job's workers, which hold the parameters; none where those need nobody else.

    token_file: the run's secret, None for a new one; command: what a server runs; spare: what a process runs that waits
    to take a lost server's place, nothing where none shall; endpoints: HOST:PORT of each server, none for free ports on
    the job's interface, which is loopback unless it names one; meeting: HOST:PORT where the launcher serves the store,
    in the namespace `network` (its file; None: the launcher's own). With a prefix in the job, server k runs where
    ${local_rank} is workers + k.
    """

    servers: int
    token_file: Path | None = None
    command: tuple[str, ...] = SERVER
    spare: tuple[str, ...] = (*SERVER, "--spare")
    endpoints: tuple[str, ...] = ()
    meeting: str | None = None
    network: Path | None = None

    def __post_init__(self) -> None:
        require(self.servers >= 0, f"servers is a count of at least 0, not {self.servers}")
        require(
            len(self.endpoints) in (0, self.servers),
            f"{self.servers} servers need {self.servers} endpoints or none, not {len(self.endpoints)}",
        )


NO_SERVERS = Serving(servers=0)
