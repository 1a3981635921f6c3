"""Coordinator link: asks an elastic run's coordinator what its launcher must know, and writes where others find it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gossamer.base import bounded_file
from gossamer.errors import ConnectError, require

RUN_CARD = "coordinator.json"


class CoordinatorLink(Protocol):
    """The coordinator, as the launcher beside it sees it."""

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def members(self) -> Collection[int]:
        """Numbers of the members of the newest view; none before the first."""

    @property
    def finishing(self) -> bool:
        """Whether a member has left because all is done."""

    @property
    def ended(self) -> str:
        """Why nobody can come in any more; empty while the run goes on."""

    @property
    def resumed(self) -> bool:
        """Whether the run had begun before this launcher was started, so that all workers here are newcomers."""

    def settle(self, note: Callable[[str], None]) -> None:
        """Find out whether workers of the run outlived an earlier start of this launcher; else a new run begins. Call
        it before workers are started. note: is told what is waited for."""

    def launched(self, number: int) -> None:
        """Hear that the launcher has started this member."""

    def asked(self) -> int | None:
        """The number of workers that somebody asked for since the last call, if any."""

    def gone(self, number: int) -> None:
        """Hear that the process of this member, or of one that never came to be one, has ended."""

    def expect(self, workers: int) -> None:
        """Hear that no more than so many are on their way to the first view."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RemoteCoordinator:
    """A coordinator beside another launcher: it sees for itself whose connection closes."""

    address: tuple[str, int]
    members: Collection[int] = ()
    finishing: bool = False
    ended: str = ""
    resumed: bool = False

    def asked(self) -> int | None:
        return None

    def settle(self, note: Callable[[str], None]) -> None: ...
    def launched(self, number: int) -> None: ...
    def gone(self, number: int) -> None: ...
    def expect(self, workers: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RunCard:
    """Where an elastic run's coordinator listens and which file has its token: for commands on this machine."""

    address: tuple[str, int]
    token_file: Path

    def write(self, logs: Path) -> Path:
        """Write it into a run's folder of logs, for its owner alone. It holds no secret."""
        path = logs / RUN_CARD
        path.unlink(missing_ok=True)
        host, port = self.address
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({"coordinator": f"{host}:{port}", "token_file": str(self.token_file)}, file)
        return path


def read_run_card(logs: Path) -> RunCard:
    """The card of the run with these logs. Raises ConnectError where there is none."""
    path = logs / RUN_CARD
    try:
        read = json.loads(bounded_file.read_text(path))
        host, _, port = str(read["coordinator"]).rpartition(":")
        require(bool(host), "no host")
        return RunCard((host, int(port)), Path(read["token_file"]))
    except FileNotFoundError:
        raise ConnectError(
            f"There is no {path}, so no elastic run with these logs is under way: it is over, or it was started with "
            "a fixed number of workers. One that may grow and shrink is started so: gossamer run --workers 2:8 SCRIPT"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConnectError(
            f"{path} does not tell where the run's coordinator is ({type(problem).__name__}: {problem}). Name it as "
            "the run printed it: gossamer resize HOST:PORT N --token-file FILE"
        ) from None
