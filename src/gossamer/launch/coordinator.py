"""Coordinator of an elastic run, as launchers see it: in the first one's process, or found elsewhere by its card."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gossamer.base import bounded_file
from gossamer.base.peer_ops import Answer, Ask
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.remote_control import ask_status
from gossamer.comm.rpc.sockets import Tls
from gossamer.errors import ConnectError, require
from gossamer.launch.job import WorkerRange
from gossamer.launch.process import POLL_SECONDS

RUN_CARD = "coordinator.json"
REACH_SECONDS = 1.9
SURVIVOR_SECONDS = 30.0  # for workers that outlived the first launcher to report: they dial twice a second
OTHERS = (
    "{endpoint} is reached, and whatever listens there knows nothing of this token: it belongs to another run or to "
    "another version of Gossamer, is encrypted where this is not (--tls), or is no coordinator. Copy the token file "
    "that the run's launcher names, and write the command that it printed."
)


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


class LocalCoordinator:
    """Serves the coordinator in threads of this process until it is closed. Implements CoordinatorLink.

    listen: where, port 0 for any free one; journal: its file, which outlives this process only where that is killed;
    beside: as CoordinatorServer's. Raises ConnectError where the port is taken, or the address is none of this
    machine's.
    """

    def __init__(
        self,
        range_: WorkerRange,
        listen: tuple[str, int],
        token: bytes,
        journal: Path,
        note: Callable[[str], None],
        tls: Tls | None = None,
        beside: Mapping[str, Callable[[Ask], Answer]] | None = None,
    ) -> None:
        _check_free(*listen)
        self._serve = partial(
            CoordinatorServer,
            token=token,
            address=listen[0],
            least=range_.least,
            most=range_.most,
            initial=range_.initial,
            journal=journal,
            note=note,
            tls=tls,
            beside=beside,
        )
        self._journal = journal
        self._server = self._serve(port=listen[1])
        self.address = self._server.address
        self._resizes = 0  # of which the launcher knows

    @property
    def resumed(self) -> bool:
        return self._server.world > 0

    def settle(self, note: Callable[[str], None]) -> None:
        """Continue the journal's run where a worker of it reports within SURVIVOR_SECONDS; else begin a new one."""
        if not self._server.ended and (not self.resumed or self._survivors_report(note)):
            return
        self._server.close()
        self._journal.unlink(missing_ok=True)
        self._server = self._serve(port=self.address[1])

    def _survivors_report(self, note: Callable[[str], None]) -> bool:
        survivors = self._server.survivors
        if not survivors:
            return False
        note(
            f"the last run of this command was cut off while other launchers had workers in it ({survivors}): waiting "
            f"up to {SURVIVOR_SECONDS:g} s for a report of one (journal: {self._journal})"
        )
        until = time.monotonic() + SURVIVOR_SECONDS
        while not self._server.heard_survivors and not self._server.ended and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        heard = self._server.heard_survivors > 0 and not self._server.ended
        if heard:
            note("workers of that run are there, so it continues; the workers here join it as newcomers")
        else:
            note("no worker of that run reported, so a new run begins, from the checkpoint that the script loads")
        return heard

    def launched(self, number: int) -> None:
        self._server.launched(number)

    @property
    def members(self) -> Collection[int]:
        return self._server.members

    @property
    def finishing(self) -> bool:
        return self._server.finishing

    @property
    def ended(self) -> str:
        return self._server.ended

    def asked(self) -> int | None:
        if self._server.resizes == self._resizes:
            return None
        self._resizes = self._server.resizes
        return self._server.most

    def gone(self, number: int) -> None:
        self._server.gone(number)

    def expect(self, workers: int) -> None:
        self._server.expect(workers)

    def close(self) -> None:
        """End the run: workers of other launchers that are still in it are told so."""
        self._server.end("its first launcher has ended")
        self._server.close()
        self._journal.unlink(missing_ok=True)


def check_joinable(address: tuple[str, int], token: bytes, tls: Tls | None = None) -> None:
    """Raise ConnectError, within two seconds, unless a coordinator listens there that has the same token."""
    endpoint = f"{address[0]}:{address[1]}"
    try:
        socket.create_connection(address, REACH_SECONDS).close()
    except ConnectionRefusedError:
        raise ConnectError(
            f"Nothing listens at {endpoint}: the run there is over, or has not begun, or listens at another port. Its "
            "launcher prints the command by which others join it."
        ) from None
    except OSError as problem:
        raise ConnectError(
            f"No connection to {endpoint} ({problem}): the address is wrong, its machine is off, or a firewall is "
            "shut. An elastic run listens on loopback unless it is started with --listen HOST:PORT or --interface NAME."
        ) from None
    try:
        ask_status(address, token, seconds=REACH_SECONDS, tls=tls)
    except ConnectError:
        raise ConnectError(OTHERS.format(endpoint=endpoint)) from None


def _check_free(host: str, port: int) -> None:
    """The endpoint's own error knows of no command line."""
    try:
        with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise ConnectError(
                f"Port {port} is in use on this machine, so nobody could join this run at {host}:{port}. Take another "
                f"one: --listen {host}:{port + 1}; `ss -ltnp sport = :{port}` shows who has it. To add workers to the "
                f"run that has it: --join {host}:{port} --token-file FILE"
            ) from None
        raise ConnectError(
            f"This run's coordinator cannot listen at {host}:{port} ({problem}). Name an address of this machine: "
            "--listen HOST:PORT, or --interface NAME"
        ) from None


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
