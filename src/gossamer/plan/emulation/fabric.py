"""Fabrics: carry packets between emulated hosts. This file has the protocol, and the fabric for rates only.

It consists of the kernel's virtual Ethernet pairs, a bridge, and a token bucket filter at each end, which limits the
rate of a device. For delays and shared links see tun_switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from gossamer.comm.network import Host, Network
from gossamer.comm.network.parse import UNLIMITED_BITS_PER_SECOND
from gossamer.plan.emulation.namespaces import EmulatedHost, agree_on_tcp, ip, tc


class Fabric(Protocol):
    """Carries packets between hosts until it is closed; paths and rates can change meanwhile."""

    header_bytes: int  # per packet in the interface's counters, in addition to IP

    def cut(self, a: int, b: int) -> None:
        """Drop all packets between two hosts, silently, in both directions."""

    def heal(self, a: int, b: int) -> None: ...

    def set_line(self, host: int, line: Host) -> None:
        """Change the rates of a host's link."""

    def cpu_seconds(self) -> float | None:
        """CPU time of the fabric so far; None if the kernel carries the packets."""

    def close(self) -> None: ...


# -- token buckets and queues ------------------------------------------------------------------------------------------

MTU_BYTES = 1500
ETHERNET_HEADER_BYTES = 14
LARGEST_JOINED_BYTES = 65536
BURST_SECONDS = 0.001
HEADERS_FACTOR = 1.1  # a joined packet includes the headers of all segments; one larger than the burst is segmented
QUEUE_SECONDS = 0.01
LEAST_QUEUE_BYTES = 256 << 10
SOCKETS_QUEUE_BYTES = 8 << 20  # senders wait for their own host's link: their sockets limit the queue


def joined_bytes(bits_per_second: float) -> int:
    """The largest packet that a host sends unsegmented (GSO): about a millisecond of its rate.

    Large packets cost far less CPU time; on slow links they would delay other packets.
    """
    return min(LARGEST_JOINED_BYTES, int(bits_per_second / 8 * BURST_SECONDS))


def queue_bytes(network: Network, host: int) -> int:
    """The queue of one link: the bandwidth-delay product of its longest path, of at least 10 ms; at least 256 KiB."""
    line = network.hosts[host]
    others = [other for other in range(len(network.hosts)) if other != host]
    longest = max((network.path(host, other).round_trip_seconds for other in others), default=0.0)
    fastest = max(line.up_bits_per_second, line.down_bits_per_second)
    return line_queue_bytes(fastest, longest)


def line_queue_bytes(bits_per_second: float, round_trip_seconds: float) -> int:
    """The queue of a link with a known longest round trip."""
    return max(LEAST_QUEUE_BYTES, int(bits_per_second / 8 * max(round_trip_seconds, QUEUE_SECONDS)))


def bucket(
    device: str, bits_per_second: float, usual_bits_per_second: float, limit_bytes: int, header_bytes: int = 0
) -> str:
    """The `tc` line that limits the rate of `device` in IP bytes.

    Args:
        usual_bits_per_second: rate of the line in the network. A slower line keeps the burst of this rate: a packet
            that is larger than a new burst, and already in the queue, would never be sent, nor any packet behind it.
        limit_bytes: of the queue.
        header_bytes: additional bytes per packet.
    """
    if bits_per_second >= UNLIMITED_BITS_PER_SECOND:
        return f"qdisc replace dev {device} root pfifo limit 10000"
    rate = round(bits_per_second * (MTU_BYTES + header_bytes) / MTU_BYTES)
    largest = joined_bytes(max(bits_per_second, usual_bits_per_second))
    burst = max(2 * (MTU_BYTES + header_bytes), int(largest * HEADERS_FACTOR))
    return f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst}b limit {limit_bytes}b"


# -- the kernel's bridge -----------------------------------------------------------------------------------------------

NOWHERE = 0  # the bridge's own hardware address: packets to it are dropped


def hardware_address(number: int) -> str:
    return f"02:67:00:00:00:{number:02x}"


class BridgeFabric:
    """A fabric in the kernel. The bridge has its own namespace, so that it is not visible on the machine."""

    header_bytes = ETHERNET_HEADER_BYTES

    def __init__(self, network: Network, hosts: Sequence[EmulatedHost], namespace: str) -> None:
        self._network = network
        self._hosts = hosts
        self._namespace = namespace
        ip(namespace, self._bridge_lines())
        for number, host in enumerate(hosts):
            ip(host.namespace, self._host_lines(number))
            agree_on_tcp(host)
            self.set_line(number, network.hosts[number])

    def _bridge_lines(self) -> Iterator[str]:
        yield f"link add name bridge address {hardware_address(NOWHERE)} type bridge"
        yield "link set bridge addrgenmode none up"
        for number, host in enumerate(self._hosts):
            peer = f"peer name {host.interface} address {hardware_address(number + 1)} netns {host.namespace}"
            yield f"link add name host{number} type veth {peer}"
            yield f"link set host{number} addrgenmode none master bridge up"

    def _host_lines(self, number: int) -> Iterator[str]:
        host, line = self._hosts[number], self._network.hosts[number]
        largest = max(joined_bytes(line.up_bits_per_second), 2 * MTU_BYTES)
        yield "link set lo up"
        yield f"link set {host.interface} mtu {MTU_BYTES} addrgenmode none gso_max_size {largest} up"
        yield f"address add {host.address}/24 dev {host.interface}"
        for other in range(len(self._hosts)):
            if other != number:
                yield self._neighbor(other, other + 1)

    def _neighbor(self, host: int, hardware: int) -> str:
        """A permanent neighbor entry, which avoids ARP packets in the counters."""
        there = self._hosts[host]
        return f"neigh replace {there.address} lladdr {hardware_address(hardware)} dev {there.interface} nud permanent"

    def cut(self, a: int, b: int) -> None:
        self._lead(a, b, NOWHERE)
        self._lead(b, a, NOWHERE)

    def heal(self, a: int, b: int) -> None:
        self._lead(a, b, b + 1)
        self._lead(b, a, a + 1)

    def _lead(self, sender: int, receiver: int, hardware: int) -> None:
        ip(self._hosts[sender].namespace, [self._neighbor(receiver, hardware)])

    def set_line(self, host: int, line: Host) -> None:
        own, usual = self._hosts[host], self._network.hosts[host]
        ups = line.up_bits_per_second, usual.up_bits_per_second
        downs = line.down_bits_per_second, usual.down_bits_per_second
        tc(own.namespace, [bucket(own.interface, *ups, SOCKETS_QUEUE_BYTES, ETHERNET_HEADER_BYTES)])
        waiting = queue_bytes(self._network, host)
        tc(self._namespace, [bucket(f"host{host}", *downs, waiting, ETHERNET_HEADER_BYTES)])

    def cpu_seconds(self) -> None:
        return None

    def close(self) -> None:
        """The namespaces contain everything."""
