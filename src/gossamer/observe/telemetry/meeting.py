"""Meeting: how the launchers of a fixed number of machines find the first one's store, told where the machines meet.

The first listens at the address where the machines meet, at a free port of its own, and writes that port into the
meeting's key-value store. Every frame between them carries a MAC by the run's token; where none was named, by one that
the first makes and tells in the meeting, which keeps out whoever cannot reach that.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Protocol

from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import Answer, Arrived, Ask, Await, PeerScript, Reply
from gossamer.comm.elastic.agent import LARGEST_FRAME_BYTES, RUN
from gossamer.comm.environment.run_token import TOKEN_BYTES
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc.sockets import Tls
from gossamer.comm.wire.authentication import Credentials
from gossamer.errors import GossamerError, PeerLost
from gossamer.observe.telemetry.machines import MachineDesk
from gossamer.observe.telemetry.uplink import Line, to_coordinator

KEY = "gossamer telemetry"
TOLD_SECONDS = 5.0  # machine 0 tells right after the meeting
DEAF = (
    "this machine cannot take in what the others tell of their ranks ({reason}), so the store here has its own ranks "
    "alone. Theirs are beside their own logs. Training goes on."
)
UNTOLD = (
    "machine 0 takes in nothing that this one tells of its ranks ({reason}), so its store lacks them. They are in the "
    "store beside this machine's logs. Training goes on."
)


class MeetingStore(Protocol):
    """A key-value store that all machines reach, such as torch.distributed.TCPStore."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class FirstMachine:
    """Answers other launchers at `desk` from the meeting on, until it is closed. token: the run's, or None."""

    def __init__(self, desk: MachineDesk, token: bytes | None, tls: Tls | None, note: Callable[[str], None]) -> None:
        self._desk, self._token, self._tls, self._note = desk, token, tls, note
        self._endpoint = ExitStack()

    def met(self, store: MeetingStore, address: str) -> None:
        """The machines have met. address: where this one listens for them. Raises nothing."""
        try:
            told = self._listen(address)
        except (GossamerError, OSError) as problem:
            self._note(DEAF.format(reason=problem))
            told = {}
        store.set(KEY, json.dumps(told))

    def close(self) -> None:
        self._endpoint.close()

    def _listen(self, address: str) -> dict[str, Any]:
        token = self._token or secrets.token_bytes(TOKEN_BYTES)
        credentials = Credentials(me=COORDINATOR, token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES)
        endpoint = self._endpoint.enter_context(
            TcpEndpoint(credentials, EndpointOptions(address=address, tls=self._tls))
        )
        endpoint.start(_answering(self._desk.answers))
        return {"port": endpoint.address[1], "token": None if self._token else token.hex()}


def _answering(answers: Mapping[str, Callable[[Ask], Answer]]) -> PeerScript:
    while True:
        event = yield Await()
        if isinstance(event, Arrived) and event.op.key in answers:
            yield Reply(token=event.token, answer=answers[event.op.key](event.op))


class OtherMachine:
    """The way from another machine's launcher to the first one's, which opens once they have met."""

    def __init__(self, token: bytes | None, tls: Tls | None, note: Callable[[str], None]) -> None:
        self._token, self._tls, self._note = token, tls, note
        self._found: tuple[tuple[str, int], bytes] | None = None

    def met(self, store: MeetingStore, host: str) -> None:
        """The machines have met. host: by which this one reaches the first. Raises nothing."""
        try:
            store.wait([KEY], timedelta(seconds=TOLD_SECONDS))
            told = read_json(store.get(KEY))
            token = self._token or bytes.fromhex(told["token"])
            self._found = (host, int(told["port"])), token
        except (RuntimeError, ValueError, KeyError, TypeError) as problem:
            self._note(UNTOLD.format(reason=str(problem).partition("\n")[0] or type(problem).__name__))

    @contextmanager
    def line(self) -> Iterator[Line]:
        with ExitStack() as opened:
            yield _OnceMet(self._open, opened)

    def _open(self, opened: ExitStack) -> Line:
        if self._found is None:
            raise PeerLost("The machines have not met.")
        address, token = self._found
        return opened.enter_context(to_coordinator(address, token, self._tls))


class _OnceMet:
    def __init__(self, open_line: Callable[[ExitStack], Line], opened: ExitStack) -> None:
        self._open, self._opened = open_line, opened
        self._line: Line | None = None

    def answer(self, op: Ask) -> Any:
        self._line = self._line or self._open(self._opened)
        return self._line.answer(op)
