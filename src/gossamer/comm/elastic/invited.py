"""Invited machine: finds the coordinator of a link at any of its addresses, and receives the run's token from it.

For `gossamer doctor` it also tries all addresses of the workers. The connections to the coordinator leave from one port
of this machine, so that its answers show whether a router gives the same address to this port everywhere.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from gossamer.base import system
from gossamer.base.host_port import Address
from gossamer.base.peer_ops import Answer, Pull, Push, Stamp
from gossamer.comm.elastic.agent import LARGEST_FRAME_BYTES, RUN
from gossamer.comm.membership.invitations import (
    LOOK,
    NONCE_BYTES,
    REDEEM,
    JoinLink,
    Redeemed,
    guest_of,
    read_answer,
    read_redeemed,
)
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials, OtherTokenError
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError, GossamerError, MismatchError, PeerLost

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
MOST_THREADS = 64
OTHER_RUN = "another run"  # in the problem of an address
NEEDS_TLS = (
    "this run is encrypted: add --tls FOLDER, with cert.pem, key.pem and ca.pem from the authority of the first "
    "launcher's certificates"
)


@dataclass(frozen=True, kw_only=True)
class AddressCheck:
    """How one address of a link answered. problem: why it cannot be used; empty if it can."""

    address: Address
    problem: str = ""
    seconds: float = 0.0  # to connect
    refused: str = ""  # why the coordinator does not accept the link
    members: tuple[tuple[Address, ...], ...] = ()  # addresses of each current worker
    status: str = ""  # of the run
    own: Address | None = None  # this machine's end of the connection, and the same as the coordinator sees it
    seen_as: Address | None = None
    relays: bool = False  # whether the coordinator relays connections between workers
    other_relays: tuple[Address, ...] = ()

    @property
    def name(self) -> str:
        return "{}:{}".format(*self.address)


def check_addresses(invitation: JoinLink, tls: Tls | None = None) -> Iterator[AddressCheck]:
    """Try all addresses of a link at the same time. Yields the results as they come, one per address."""
    results: queue.SimpleQueue[AddressCheck] = queue.SimpleQueue()
    with _own_port() as port:
        for address in invitation.addresses:
            # A daemon, because an address without an answer must not delay the end of the command
            act = lambda to=address: results.put(_check(invitation, to, tls, port))  # noqa: E731
            threading.Thread(target=act, daemon=True).start()
        for _ in invitation.addresses:
            yield results.get()


@contextmanager
def _own_port() -> Iterator[int]:
    """Reserves a port, from which several connections can be dialed; 0 if that is impossible."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
        try:
            system.share_port(reserved)
            reserved.bind(("", 0))
            yield int(reserved.getsockname()[1])
        except OSError:
            yield 0


@dataclass(frozen=True, kw_only=True)
class MemberCheck:
    """Whether this machine can connect to a worker of the run, or to a relay.

    addresses: where it listens, and further addresses, such as the one that a worker's router has given to it.
    """

    addresses: tuple[Address, ...]
    reached: Address | None = None  # the first one that answered
    problem: str = ""  # of the first address; empty if one was reached
    seconds: float = 0.0  # to connect


def check_members(members: Sequence[tuple[Address, ...]]) -> list[MemberCheck]:
    """Open a connection to each address of each worker, all at the same time. They ignore it."""
    if not members:
        return []
    with ThreadPoolExecutor(min(len(members), MOST_THREADS)) as pool:
        return list(pool.map(_check_member, members))


def _check_member(addresses: tuple[Address, ...]) -> MemberCheck:
    results: queue.SimpleQueue[tuple[Address, str, float]] = queue.SimpleQueue()
    for address in addresses:
        threading.Thread(target=lambda to=address: results.put(_connect(to)), daemon=True).start()
    problems = dict[Address, str]()
    for _ in addresses:
        address, problem, seconds = results.get()
        if not problem:
            return MemberCheck(addresses=addresses, reached=address, seconds=seconds)
        problems[address] = problem
    return MemberCheck(addresses=addresses, problem=problems[addresses[0]])


def _connect(address: Address) -> tuple[Address, str, float]:
    began = time.monotonic()
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        return address, _reason(error), 0.0
    return address, "", time.monotonic() - began


def redeem(invitation: JoinLink, tls: Tls | None = None) -> tuple[Address, Redeemed]:
    """Exchange a link for the run's token, at the first address that answers.

    Args:
        invitation: the content of the link.
        tls: TLS contexts, if the run encrypts.

    Returns:
        The address of the coordinator, and its answer.

    Raises:
        ConnectError: no address answers, or the link is expired, used, revoked or of another run.
    """
    if invitation.encrypted and tls is None:
        raise ConnectError(NEEDS_TLS)
    problems: list[AddressCheck] = []
    for check in check_addresses(invitation, tls):
        if not check.problem:
            return check.address, _redeem_at(invitation, check.address, tls)
        problems.append(check)
    raise ConnectError(no_address(invitation.run, problems))


def _redeem_at(invitation: JoinLink, address: Address, tls: Tls | None) -> Redeemed:
    nonce = secrets.token_hex(NONCE_BYTES)
    push = Push(
        to=COORDINATOR,
        key=REDEEM,
        stamp=Stamp(secrets.randbits(62), 0),  # a repeated request of this machine counts once
        about=nonce,
        within_seconds=ANSWER_SECONDS,
    )
    return read_redeemed(invitation, nonce, _ask(invitation, address, push, tls).about)


def _check(invitation: JoinLink, address: Address, tls: Tls | None, port: int) -> AddressCheck:
    began = time.monotonic()
    look = Pull(of=COORDINATOR, key=LOOK, within_seconds=ANSWER_SECONDS)
    try:
        with socket.create_connection(address, CONNECT_SECONDS) as connection:
            seconds, own = time.monotonic() - began, (str(connection.getsockname()[0]), port)
        answer = _ask(invitation, address, look, tls, own if port else None)
    except OtherTokenError:
        return AddressCheck(address=address, problem=f"it belongs to {OTHER_RUN}")
    except MismatchError as error:
        return AddressCheck(address=address, refused=str(error))
    except PeerLost:
        return AddressCheck(address=address, problem="it does not answer as the coordinator of a run")
    except (OSError, GossamerError) as error:
        return AddressCheck(address=address, problem=_reason(error))
    try:
        read = read_answer(answer.about)
        return AddressCheck(
            address=address,
            seconds=seconds,
            members=tuple(tuple((str(host), int(port)) for host, port in each) for each in read["members"]),
            status=str(read["status"]),
            own=own,
            seen_as=None if read["seen_as"] is None else (str(read["seen_as"][0]), int(read["seen_as"][1])),
            relays=bool(read["relays"]),
            other_relays=tuple((str(host), int(port)) for host, port in read["other_relays"]),
        )
    except ConnectError as error:
        return AddressCheck(address=address, refused=str(error))
    except (GossamerError, KeyError, TypeError, ValueError):
        return AddressCheck(address=address, problem="its answer is invalid")


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_SECONDS:g} s"
    return getattr(error, "strerror", None) or str(error)


def _ask(
    invitation: JoinLink, address: Address, ask: Push | Pull, tls: Tls | None, dial_from: Address | None = None
) -> Answer:
    """One request as a guest. The coordinator proves that it knows the secret of the link."""
    me = guest_of(invitation.number)
    credentials = Credentials(me=me, token=invitation.secret, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES)
    with TcpEndpoint(credentials, EndpointOptions(tls=tls, dial_from=dial_from)) as endpoint:
        endpoint.meet({COORDINATOR: address})
        answer: Answer = endpoint.answer(ask)
        return answer


def no_address(run: str, problems: Sequence[AddressCheck]) -> str:
    """The error if no address of a link can be used: each with its problem, and the remedy."""
    found = ", ".join(f"{each.name} ({each.problem})" for each in problems)
    if any(OTHER_RUN in each.problem for each in problems):
        return (
            f"this link is for run {run[:8]}, which is over: {found}. A run that is started again has new "
            "links: `gossamer invite RUN` prints one on the first launcher's machine"
        )
    return (
        f"no address of this link can be reached: {found}. The run is over, or a firewall or router is between the "
        "machines: forward the port to the first launcher's machine and start it with --public-address HOST:PORT"
    )
