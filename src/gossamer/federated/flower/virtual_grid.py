"""Virtual grid: runs Flower's ClientApps in this process and in virtual time, on heterogeneous devices.

A strategy or ServerApp that waits on this Grid advances a virtual clock; no process sleeps. The ClientApp itself
answers each message. Its device's profile sets the time of the reply, from the bytes down and up and the optimizer
steps.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch.optim.optimizer import register_optimizer_step_post_hook

from gossamer.base.torch_hooks import uncompiled
from gossamer.errors import require
from gossamer.federated.flower.messages import (
    FIRST_NODE,
    RUN,
    SERVER_NODE,
    GossamerGrid,
    called,
    content_bytes,
    copied,
    identify_this_process,
    unavailable,
)
from gossamer.federated.flower.records import RoundTraffic
from gossamer.federated.population import DeviceProfile
from gossamer.federated.population.profiles import VirtualDevice


@dataclass(frozen=True)
class ReplyUnderway:
    """A reply in transit."""

    arrived: float  # seconds of the virtual clock
    reply: Message


class VirtualGrid(GossamerGrid):
    """A Grid of simulated devices in virtual time.

    Exceptions of an app and drawn failures of a device become error replies, as in Flower. The clock advances only
    while the caller waits: in `send_and_receive` until all replies have arrived or the timeout has passed, in
    `pull_messages` until the next of the requested replies.

    Args:
        client_app: the app on every node.
        devices: number of identical devices without delays, or the profile of each device.
        run_config: of every node's Context.
        seed: of random delays and failures.

    Attributes:
        seconds: the virtual clock.
        traffic: bytes of each pushed batch of messages.
        contexts: Context of each node.

    Raises:
        ValueError: there are no devices.

    Example:
        grid = VirtualGrid(client_app, devices=100)
        result = FedAvg().start(grid, first_arrays, num_rounds=10)
    """

    def __init__(
        self,
        client_app: ClientApp,
        devices: int | Sequence[DeviceProfile],
        *,
        run_config: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        profiles = [DeviceProfile()] * devices if isinstance(devices, int) else list(devices)
        require(len(profiles) > 0, "a grid needs at least one device: write VirtualGrid(app, devices=10)")
        self.seconds = 0.0
        self.traffic: list[RoundTraffic] = []
        self._app = client_app
        self._devices = {FIRST_NODE + i: VirtualDevice(i, each, seed) for i, each in enumerate(profiles)}
        self.contexts = {
            node: Context(
                run_id=RUN,
                node_id=node,
                node_config={"partition-id": each.number, "num-partitions": len(profiles)},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node, each in self._devices.items()
        }
        self._coming: dict[str, ReplyUnderway] = {}
        identify_this_process()

    # Methods of Grid.

    def get_node_ids(self) -> list[int]:
        """All nodes; an absent device replies when it is available again."""
        return list(self._devices)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Raises ValueError for an unknown node."""
        self.traffic.append(RoundTraffic())
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = [each for each in message_ids if each in self._coming]
        if wanted:
            self.seconds = max(self.seconds, min(self._coming[each].arrived for each in wanted))
        return self._arrived(wanted)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        until = self.seconds + (inf if timeout is None else timeout)
        wanted = self.push_messages(messages)
        last = max((self._coming[each].arrived for each in wanted), default=self.seconds)
        self.seconds = max(self.seconds, min(last, until))
        replies = self._arrived(wanted)
        for each in wanted:
            self._coming.pop(each, None)  # too late: its identity is not returned
        return replies

    # Devices.

    def _arrived(self, wanted: Sequence[str]) -> list[Message]:
        """Replies that have arrived, in order of arrival."""
        there = [each for each in wanted if self._coming[each].arrived <= self.seconds]
        underway = sorted((self._coming.pop(each) for each in there), key=lambda each: each.arrived)
        return [each.reply for each in underway]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        if node not in self._devices:
            raise ValueError(f"there is no node {node}: ask get_node_ids()")
        name = str(uuid.uuid4())
        message.metadata.__dict__["_message_id"] = name  # like Flower's own grids
        message.content = RecordDict({key: copied(each) for key, each in message.content.items()})
        down = content_bytes(message.content)
        reply, steps = self._answered(message)
        up = content_bytes(reply.content) if reply.has_content() else 0
        times = self._devices[node].take(self.seconds, down, steps, up)
        self.traffic[-1].went_down(node, down, down)
        self.traffic[-1].went_up(node, up, up)
        self._coming[name] = ReplyUnderway(times.arrived, reply)
        return name

    def _answered(self, message: Message) -> tuple[Message, int]:
        """The app's reply and its number of optimizer steps."""
        node = message.metadata.dst_node_id
        steps = StepCount()
        if self._devices[node].fails_next():
            reply = unavailable(message, "the device did not finish")
        else:
            with steps.counting():
                reply = called(self._app, message, self.contexts[node])
        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        return reply, steps.count


def simulate(
    server_app: ServerApp,
    client_app: ClientApp,
    devices: int | Sequence[DeviceProfile],
    *,
    run_config: dict[str, Any] | None = None,
    seed: int = 0,
) -> VirtualGrid:
    """Run a ServerApp with ClientApps to its end, in this process and in virtual time.

    Args:
        server_app: the server's app.
        client_app: the app on every node.
        devices: number of identical devices without delays, or the profile of each device.
        run_config: of every Context.
        seed: of random delays and failures.

    Returns:
        The grid, with its clock (`seconds`) and `traffic`.

    Example:
        grid = simulate(server_app, client_app, devices=drawn_profiles(100))
        print(grid.seconds, grid.traffic)
    """
    grid = VirtualGrid(client_app, devices, run_config=run_config, seed=seed)
    server_app(
        grid,
        Context(run_id=RUN, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config=dict(run_config or {})),
    )
    return grid


class StepCount:
    """Counts optimizer steps in this process."""

    count = 0

    def _count(self, *_: Any) -> None:
        self.count += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        hook = register_optimizer_step_post_hook(uncompiled(self._count))
        try:
            yield
        finally:
            hook.remove()
