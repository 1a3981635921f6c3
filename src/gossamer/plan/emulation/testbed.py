"""Testbed: builds emulated hosts and the fabric between them, and removes everything at the end."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType, TracebackType

from gossamer.comm.network import Network
from gossamer.errors import require
from gossamer.plan.emulation.capabilities import needs_switch
from gossamer.plan.emulation.fabric import MTU_BYTES, BridgeFabric, Fabric
from gossamer.plan.emulation.namespaces import EmulationError, call, emulated_hosts, new_tag, remove_stale
from gossamer.plan.emulation.tun_switch import SwitchFabric


class EmulatedNetwork:
    """An emulated network that exists during the block: `with EmulatedNetwork(network) as testbed: ...`.

    Needs permission to create network namespaces (see `plan`). hosts: one for each of the network's; emulation:
    "kernel" or "switch"; seed: of loss and jitter. Hosts that a relay of the network connects exchange no packets, as
    behind routers: the workers must relay. Everything is removed at the end of the block, also after an error
    or SIGTERM; leftovers of a killed process are removed by the next testbed.
    """

    mtu = MTU_BYTES

    def __init__(self, network: Network, seed: int = 0) -> None:
        self.network = network
        self.emulation = "switch" if needs_switch(network) else "kernel"
        self._seed = seed
        self._tag = new_tag()
        self.hosts = emulated_hosts(self._tag, len(network.hosts))
        self._open = ExitStack()

    def __enter__(self) -> EmulatedNetwork:
        remove_stale()
        with ExitStack() as opening:
            opening.enter_context(_orderly_end())
            opening.callback(self._remove_namespaces)
            self._fabric = opening.enter_context(contextlib.closing(self._build()))
            for pair in self.network.relayed:
                self._fabric.cut(*pair)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._open.close()

    def _build(self) -> Fabric:
        self._add_namespaces()
        if self.emulation == "kernel":
            try:
                return BridgeFabric(self.network, self.hosts, self._bridge)
            except EmulationError as problem:
                # Not every kernel has bridges, virtual Ethernet and token buckets
                self._remove_namespaces()
                self._add_namespaces()
                self.emulation = "switch"
                return self._switch(f"; the kernel alone failed, too: {problem}")
        return self._switch("")

    def _switch(self, also: str) -> SwitchFabric:
        try:
            return SwitchFabric(self.network, self.hosts, self._seed)
        except (EmulationError, OSError) as problem:
            raise EmulationError(f"no network could be built on this machine: {problem}{also}") from problem

    @property
    def header_bytes(self) -> int:
        """Bytes per packet in interface counters, in addition to IP."""
        return self._fabric.header_bytes

    @property
    def _bridge(self) -> str:
        return f"{self._tag}-bridge"

    @property
    def _namespaces(self) -> tuple[str, ...]:
        return (*(host.namespace for host in self.hosts), self._bridge)

    def _add_namespaces(self) -> None:
        call(("ip", "-batch", "-"), "".join(f"netns add {name}\n" for name in self._namespaces))

    def _remove_namespaces(self) -> None:
        """Remove all of them, whether or not each exists."""
        lines = "".join(f"netns delete {name}\n" for name in self._namespaces)
        with contextlib.suppress(EmulationError):
            call(("ip", "-force", "-batch", "-"), lines)

    def interface_bytes(self) -> list[int]:
        """IP bytes sent by each host, from the kernel's counters."""
        return [self._counted(number, "tx") for number in range(len(self.hosts))]

    def received_bytes(self) -> list[int]:
        return [self._counted(number, "rx") for number in range(len(self.hosts))]

    def _counted(self, number: int, direction: str) -> int:
        host = self.hosts[number]
        (link,) = json.loads(call(("ip", "-n", host.namespace, "-s", "-j", "link", "show", "dev", host.interface)))
        counters = link["stats64"][direction]
        return int(counters["bytes"] - self.header_bytes * counters["packets"])

    def cpu_seconds(self) -> float | None:
        """CPU time of the switch so far; None if the kernel carries the packets."""
        return self._fabric.cpu_seconds()

    def cut(self, host: int, other: int | None = None) -> None:
        """Silently drop all packets between two hosts, or between one and all others."""
        for a, b in self._pairs(host, other):
            self._fabric.cut(a, b)

    def heal(self, host: int, other: int | None = None) -> None:
        """The opposite of `cut`."""
        for a, b in self._pairs(host, other):
            if self.network.relay(a, b) is None:
                self._fabric.heal(a, b)

    def slow(self, host: int, factor: float) -> None:
        """Divide a host's rates in the network by `factor`; 1 restores them."""
        require(factor > 0, f"slow needs a positive factor, got {factor}")
        line = self.network.hosts[self._checked(host)]
        slower = replace(
            line,
            up_bits_per_second=line.up_bits_per_second / factor,
            down_bits_per_second=line.down_bits_per_second / factor,
        )
        self._fabric.set_line(host, slower)

    def _pairs(self, host: int, other: int | None) -> Iterator[tuple[int, int]]:
        require(host != other, f"a host has no link to itself, got {host} twice")
        others = range(len(self.hosts)) if other is None else (self._checked(other),)
        return ((self._checked(host), each) for each in others if each != host)

    def _checked(self, host: int) -> int:
        require(0 <= host < len(self.hosts), f"hosts are numbered from 0 to {len(self.hosts) - 1}, got {host}")
        return host


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Unless the process handles SIGTERM, turn it into an exception, so that `with` blocks exit."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
