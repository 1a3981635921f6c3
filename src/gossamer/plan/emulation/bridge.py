"""Bridge fabric, for rates only: the kernel's virtual Ethernet pairs, a bridge, and a token bucket at each end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gossamer.comm.network import Host, Network
from gossamer.plan.emulation.namespaces import EmulatedHost, agree_on_tcp
from gossamer.plan.emulation.shell import ip, tc
from gossamer.plan.emulation.traffic_shaping import (
    ETHERNET_HEADER_BYTES,
    MTU_BYTES,
    SOCKETS_QUEUE_BYTES,
    bucket,
    joined_bytes,
    queue_bytes,
)

NOWHERE = 0  # the bridge's own hardware address: what is sent there is dropped


def hardware_address(number: int) -> str:
    return f"02:67:00:00:00:{number:02x}"


class BridgeFabric:
    """A fabric inside the kernel. The bridge has a namespace of its own, so that nothing shows in the machine's."""

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
        """A permanent neighbor entry, so that no ARP packets are counted."""
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
        up = bucket(self._hosts[host].interface, line.up_bits_per_second, SOCKETS_QUEUE_BYTES, ETHERNET_HEADER_BYTES)
        waiting = queue_bytes(self._network, host)
        tc(self._hosts[host].namespace, [up])
        tc(self._namespace, [bucket(f"host{host}", line.down_bits_per_second, waiting, ETHERNET_HEADER_BYTES)])

    def cpu_seconds(self) -> None:
        return None

    def close(self) -> None:
        """The namespaces hold all there is."""
