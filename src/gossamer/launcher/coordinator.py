"""Coordinator of an elastic run: served by the first launcher, reached by the others, found by its run card."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gossamer.base import bounded_file, system
from gossamer.base.host_port import family_of, read_host_port
from gossamer.base.json_text import read_json
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.relay import RelayServer
from gossamer.comm.elastic.remote_control import ask_identity
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError
from gossamer.launcher.process import POLL_SECONDS

RUN_CARD = "coordinator.json"
REACH_SECONDS = 1.9
SURVIVOR_SECONDS = 30.0  # for surviving workers to report after a restart; they dial twice a second
OTHERS = (
    "{endpoint} is reachable, but it does not accept this token: it belongs to another run or another version of "
    "Gossamer, is encrypted while this command is not (--tls), or is no coordinator. Copy the token file that the "
    "run's launcher names, and use the command that it printed."
)


class CoordinatorLink(Protocol):
    """A launcher's connection to the coordinator of its run."""

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def run(self) -> str:
        """Identity of the run, the same for all of its launchers. Read it after `settle`."""

    @property
    def members(self) -> Collection[int]:
        """Numbers of the members of the newest view; empty before the first view."""

    @property
    def finishing(self) -> bool:
        """Whether a member has left because it finished its script."""

    @property
    def ended(self) -> str:
        """Why the run accepts no more members; empty while the run continues."""

    @property
    def resumed(self) -> bool:
        """Whether the run began before this launcher was started, so that all workers here are newcomers."""

    def settle(self, note: Callable[[str], None]) -> None:
        """Continue the run of an earlier start of this launcher if workers of it survived; else begin a new run. Call
        it before workers are started. note: shows the wait to the user."""

    def invite(self, lifetime_seconds: float | None, uses: int | None) -> str:
        """Return a link for other machines, see InvitationBook.create. Call it after `settle`."""

    def launched(self, number: int) -> None:
        """Report that the launcher has started this member."""

    def asked(self) -> int | None:
        """The number of workers requested since the last call; None if no request came."""

    def gone(self, number: int) -> None:
        """Report that the process of this member, or of a worker that never joined, has ended."""

    def expect(self, workers: int) -> None:
        """Report the maximum number of workers that will still join the first view."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RemoteCoordinator:
    """The coordinator of another launcher. It detects closed connections itself, so all reports are no-ops.

    run: identity of its run. relay: relays connections of workers of that run.
    """

    address: tuple[str, int]
    run: str
    relay: RelayServer | None = None
    members: Collection[int] = ()
    finishing: bool = False
    ended: str = ""
    resumed: bool = False

    def asked(self) -> int | None:
        return None

    def settle(self, note: Callable[[str], None]) -> None: ...
    def invite(self, lifetime_seconds: float | None, uses: int | None) -> str:
        raise ConnectError("links are made by the run's first launcher: write `gossamer invite RUN` on its machine")

    def launched(self, number: int) -> None: ...
    def gone(self, number: int) -> None: ...
    def expect(self, workers: int) -> None: ...
    def close(self) -> None:
        if self.relay is not None:
            self.relay.close()


class LocalCoordinator:
    """Serves the coordinator in threads of this process until it is closed. Implements CoordinatorLink.

    Args:
        serve: starts a CoordinatorServer at the address, port and journal that it receives.
        listen: address and port; port 0 for any free one.
        journal: file of the coordinator's journal. It remains only if this process is killed.

    Raises:
        ConnectError: the port is in use, or the address does not belong to this machine.
    """

    def __init__(self, serve: Callable[..., CoordinatorServer], listen: tuple[str, int], journal: Path) -> None:
        _check_free(*listen)
        self._serve = partial(serve, address=listen[0], journal=journal)
        self._journal = journal
        self._server = self._serve(port=listen[1])
        self.address = self._server.address
        self._resizes = 0  # number of requests that the launcher has handled

    @property
    def run(self) -> str:
        return self._server.run

    @property
    def resumed(self) -> bool:
        return self._server.world > 0

    def settle(self, note: Callable[[str], None]) -> None:
        """Continue the journal's run if a worker of it reports within SURVIVOR_SECONDS; else begin a new one."""
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
            f"the last run of this command was interrupted while other launchers had workers in it ({survivors}): "
            f"waiting up to {SURVIVOR_SECONDS:g} s for one of them to report (journal: {self._journal})"
        )
        until = time.monotonic() + SURVIVOR_SECONDS
        while not self._server.answering_survivors and not self._server.ended and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        received = self._server.answering_survivors > 0 and not self._server.ended
        if received:
            note("workers of that run reported, so it continues; the workers here join it as newcomers")
        else:
            note("no worker of that run reported, so a new run begins, from the checkpoint that the script loads")
        return received

    def invite(self, lifetime_seconds: float | None, uses: int | None) -> str:
        assert self._server.invitations is not None  # it is made with `welcome`
        return self._server.invitations.create(lifetime_seconds, uses).link()

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
        """End the run, and notify remaining workers of other launchers."""
        self._server.end("its first launcher has ended")
        self._server.close()
        self._journal.unlink(missing_ok=True)


def joinable_run(address: tuple[str, int], token: bytes, tls: Tls | None = None) -> str:
    """Return the identity of the run whose coordinator listens at the address. Raises ConnectError, within two seconds,
    unless one with the same token does."""
    endpoint = f"{address[0]}:{address[1]}"
    try:
        socket.create_connection(address, REACH_SECONDS).close()
    except ConnectionRefusedError:
        raise ConnectError(
            f"Nothing listens at {endpoint}: the run is over, has not begun, or listens at another port. Its launcher "
            "prints the command that joins it."
        ) from None
    except OSError as problem:
        raise ConnectError(
            f"No connection to {endpoint} ({problem}): the address is wrong, its machine is off, or a firewall blocks "
            "it. An elastic run listens on loopback unless it is started with --listen HOST:PORT or --interface NAME."
        ) from None
    try:
        return ask_identity(address, token, seconds=REACH_SECONDS, tls=tls)
    except ConnectError:
        raise ConnectError(OTHERS.format(endpoint=endpoint)) from None


def _check_free(host: str, port: int) -> None:
    """Raise ConnectError with command-line remedies; the endpoint's own error has none."""
    try:
        with closing(socket.socket(family_of(host))) as probe:
            system.reuse_address(probe)
            probe.bind((host, port))
            probe.listen()
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise ConnectError(
                f"Port {port} is in use on this machine, so workers could not join this run at {host}:{port}. Use "
                f"another port: --listen {host}:{port + 1}; `ss -ltnp sport = :{port}` shows which process has it. To "
                f"add workers to the run at this port: --join {host}:{port} --token-file FILE"
            ) from None
        raise ConnectError(
            f"This run's coordinator cannot listen at {host}:{port} ({problem}). Name an address of this machine: "
            "--listen HOST:PORT, or --interface NAME"
        ) from None


@dataclass(frozen=True)
class RunCard:
    """Address of an elastic run's coordinator and path of its token file, for commands on this machine."""

    address: tuple[str, int]
    token_file: Path

    def write(self, logs: Path) -> Path:
        """Write the card into a run's folder of logs, readable by its owner only. It contains no secret."""
        path = logs / RUN_CARD
        path.unlink(missing_ok=True)
        host, port = self.address
        card = json.dumps({"coordinator": f"{host}:{port}", "token_file": str(self.token_file)})
        with system.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as file:
            system.write_all(file, card.encode())
        return path


def read_run_card(logs: Path) -> RunCard:
    """Read the card of the run with these logs. Raises ConnectError if it is missing or invalid."""
    path = logs / RUN_CARD
    try:
        read = read_json(bounded_file.read_text(path))
        return RunCard(read_host_port(str(read["coordinator"])), Path(read["token_file"]))
    except FileNotFoundError:
        raise ConnectError(
            f"There is no {path}, so no elastic run with these logs is in progress: it is over, or it was started with "
            "a fixed number of workers. To start an elastic run: gossamer run --workers 2:8 SCRIPT"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConnectError(
            f"{path} does not contain the address of the run's coordinator ({type(problem).__name__}: {problem}). "
            "Write it as the run printed it: gossamer resize HOST:PORT N --token-file FILE"
        ) from None
