"""Meeting: how launchers of a fixed number of machines find the first one's receiver, through the rendezvous store.

The first launcher listens at the rendezvous address on a free port, and writes that port into the rendezvous store.
Every frame has a MAC by the run's token. Without a token, the first launcher makes one and writes it into that store,
so that only processes that reach the store can send.
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
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import GossamerError, PeerLost
from gossamer.observe.telemetry.machines import MachineDesk
from gossamer.observe.telemetry.uplink import Line, to_coordinator

KEY = "gossamer telemetry"
FIRST_MACHINE_SECONDS = 5.0  # machine 0 writes right after the rendezvous
DEAF = (
    "this machine cannot receive rows of the other machines ({reason}), so its store has its own ranks only. Theirs "
    "are next to their own logs. Training continues."
)
UNTOLD = (
    "machine 0 cannot receive this machine's rows ({reason}), so its store lacks these ranks. They are in the store "
    "next to this machine's logs. Training continues."
)


class MeetingStore(Protocol):
    """A key-value store that all machines can reach, such as torch.distributed.TCPStore."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class FirstMachine:
    """Answers other launchers at `desk` from the rendezvous until it is closed. token: the run's, or None."""

    def __init__(self, desk: MachineDesk, token: bytes | None, tls: Tls | None, note: Callable[[str], None]) -> None:
        self._desk, self._token, self._tls, self._note = desk, token, tls, note
        self._endpoint = ExitStack()

    def met(self, store: MeetingStore, address: str) -> None:
        """Call it after the rendezvous. address: to listen at. It does not raise."""
        try:
            found = self._listen(address)
        except (GossamerError, OSError) as problem:
            self._note(DEAF.format(reason=problem))
            found = {}
        store.set(KEY, json.dumps(found))

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
    """Connection of another machine's launcher to the first one, available after the rendezvous."""

    def __init__(self, token: bytes | None, tls: Tls | None, note: Callable[[str], None]) -> None:
        self._token, self._tls, self._note = token, tls, note
        self._found: tuple[tuple[str, int], bytes] | None = None

    def met(self, store: MeetingStore, host: str) -> None:
        """Call it after the rendezvous. host: address of the first machine. It does not raise."""
        try:
            store.wait([KEY], timedelta(seconds=FIRST_MACHINE_SECONDS))
            found = read_json(store.get(KEY))
            token = self._token or bytes.fromhex(found["token"])
            self._found = (host, int(found["port"])), token
        except (RuntimeError, ValueError, KeyError, TypeError) as problem:
            self._note(UNTOLD.format(reason=str(problem).partition("\n")[0] or type(problem).__name__))

    @contextmanager
    def line(self) -> Iterator[Line]:
        with ExitStack() as opened:
            yield _OnceMet(self._open, opened)

    def _open(self, opened: ExitStack) -> Line:
        if self._found is None:
            raise PeerLost("The rendezvous of the machines is not complete.")
        address, token = self._found
        return opened.enter_context(to_coordinator(address, token, self._tls))


class _OnceMet:
    def __init__(self, open_line: Callable[[ExitStack], Line], opened: ExitStack) -> None:
        self._open, self._opened = open_line, opened
        self._line: Line | None = None

    def answer(self, op: Ask) -> Any:
        self._line = self._line or self._open(self._opened)
        return self._line.answer(op)
