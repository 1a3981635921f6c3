"""TCP grid: nodes are processes that connect to a Gossamer server over authenticated connections."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from gossamer.base.host_port import Address
from gossamer.base.peer_ops import Await, Peer, PeerScript, Reply
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.errors import MalformedError
from gossamer.federated.flower.desk import MessageDesk, answer_letters
from gossamer.federated.flower.messages import (
    FIRST_NODE,
    RUN,
    GossamerGrid,
    MessageHead,
    answer_from_bytes,
    answer_to_bytes,
    called,
    content_from_bytes,
    content_to_bytes,
    head_of,
    identify_this_process,
    unavailable,
)
from gossamer.federated.messages import CLIENT, THE_SERVER

CLOSING_SECONDS = 10.0


class TcpGrid(GossamerGrid):
    """A Grid of nodes that run `serve_node`.

    A node that is silent for longer than the endpoint's `dead_after_seconds` gets an error reply, as in Flower, and can
    receive messages again after it returns.

    Args:
        endpoint: of the peer THE_SERVER. The grid uses it until `close`, which does not close the endpoint.

    Example:
        grid = TcpGrid(endpoint)
        result = FedAvg().start(grid, first_arrays, num_rounds=10)
        grid.close()
    """

    def __init__(self, endpoint: TcpEndpoint) -> None:
        self._endpoint, self._desk = endpoint, MessageDesk()
        self._changed = threading.Condition()
        self._asked: dict[str, tuple[tuple[int, int], Message]] = {}  # by message: node and letter, and the message
        identify_this_process()
        endpoint.start(self._listen())

    def close(self, *, within_seconds: float = CLOSING_SECONDS) -> None:
        """End the grid: all present nodes learn that there are no more messages, so that `serve_node` returns there.

        Args:
            within_seconds: how long to wait for nodes that do not ask for a message now, in seconds. A node that asks
                after the endpoint was closed waits for another server.
        """
        with self._changed:
            content = self._desk.end()
        self._answer_all(content)
        with self._changed:
            self._changed.wait_for(lambda: not self._desk.untold, within_seconds)

    def get_node_ids(self) -> list[int]:
        """Nodes that are present now."""
        with self._changed:
            return [FIRST_NODE + number for number in sorted(self._desk.present)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        with self._changed:
            there = [name for name in message_ids if name in self._asked and self._asked[name][0] in self._desk.answers]
            return [self._reply(name) for name in there]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        wanted = self.push_messages(messages)
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._asked[name][0] in self._desk.answers for name in wanted),
                None if until is None else max(until - time.monotonic(), 0.0),
            )
            replies = self.pull_messages(wanted)
            for name in wanted:
                if name in self._asked:  # too late: its identity is not returned
                    self._desk.forget(*self._asked.pop(name)[0])
        return replies

    def _listen(self) -> PeerScript:
        while True:
            event = yield Await()
            with self._changed:
                content = self._desk.react(event)
                self._changed.notify_all()
            yield from content

    def _answer_all(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            self._endpoint.answer(reply)

    def _push(self, message: Message) -> str:
        name = str(uuid.uuid4())
        message.metadata.__dict__["_message_id"] = name  # like Flower's own grids
        node = message.metadata.dst_node_id - FIRST_NODE
        data = content_to_bytes(message.content)
        with self._changed:
            number, content = self._desk.write(node, head_of(message), data)
            self._asked[name] = (node, number), message
        self._answer_all(content)
        return name

    def _reply(self, name: str) -> Message:
        place, asked = self._asked.pop(name)
        data = self._desk.answers.pop(place)
        if data is None:
            reply = unavailable(asked, f"node {asked.metadata.dst_node_id} is gone")
        else:
            try:
                reply = answer_from_bytes(data, asked)
            except MalformedError as error:
                reply = unavailable(asked, str(error))
        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        return reply


def serve_node(
    app: ClientApp,
    endpoint: TcpEndpoint,
    server: Address,
    *,
    nodes: int,
    run_config: dict[str, Any] | None = None,
) -> int:
    """Answer the messages of a TcpGrid until it is closed.

    Args:
        app: the app of this node. The state of its Context lasts as long as this call.
        endpoint: of the peer `node_peer(number)`.
        server: address of the grid's endpoint.
        nodes: number of nodes, for the app's node_config.
        run_config: of the Context.

    Returns:
        Number of answered messages.

    Example:
        with TcpEndpoint(credentials, EndpointOptions(dead_after_seconds=60.0)) as endpoint:
            serve_node(app, endpoint, ("192.0.2.1", 29600), nodes=10)
    """
    number = endpoint.me.number
    identify_this_process()
    context = Context(
        run_id=RUN,
        node_id=FIRST_NODE + number,
        node_config={"partition-id": number, "num-partitions": nodes},
        state=RecordDict(),
        run_config=dict(run_config or {}),
    )

    def answer(head: str, data: bytes) -> bytes:
        invitation = msgspec.json.decode(head, type=MessageHead)
        message = Message(content_from_bytes(data), context.node_id, invitation.type, group_id=invitation.group)
        message.metadata.__dict__["_message_id"] = invitation.identity
        return answer_to_bytes(called(app, message, context))

    endpoint.meet({THE_SERVER: server})
    return int(endpoint.start(answer_letters(number, answer)).wait())


def node_peer(number: int) -> Peer:
    """Return the peer of a node's endpoint, for its Credentials.

    Args:
        number: of the node, from 0.
    """
    return Peer(CLIENT, number)
