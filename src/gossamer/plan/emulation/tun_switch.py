"""Switch fabric, also for delay, jitter, loss and shared links: `gossamer-switch` between TUN devices."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from gossamer.comm.network import Host, Network
from gossamer.comm.network import Path as NetworkPath
from gossamer.plan.emulation.fabric import (
    MTU_BYTES,
    SOCKETS_QUEUE_BYTES,
    bucket,
    joined_bytes,
    line_queue_bytes,
    queue_bytes,
)
from gossamer.plan.emulation.namespaces import DIRECTORY, EmulatedHost, EmulationError, agree_on_tcp, ip, tc

PROGRAM = Path(__file__).with_name("gossamer-switch")
GREETING = "gossamer-switch 2"
END_SECONDS = 5.0


class Switch:
    """The running program: one line of input, one line of output. It ends with its standard input, and its owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A session of its own: Ctrl-C reaches the whole terminal group, and workers need the network to save
        self._process = subprocess.Popen(
            [PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        if (greeting := self._reply()) != GREETING:
            self.close()
            raise EmulationError(
                f"{PROGRAM} printed {greeting!r} instead of {GREETING!r}: it was built from other sources. "
                "Install Gossamer again: pip install -e ."
            )

    def ask(self, line: str) -> str:
        with self._lock:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the reason of its end is reported below
                self._process.stdin.write(line + "\n")
            reply = self._reply()
        if reply.startswith("error "):
            raise EmulationError(f"the switch refused the command: {reply.removeprefix('error ')}")
        return reply

    def _reply(self) -> str:
        assert self._process.stdout is not None
        reply = self._process.stdout.readline().strip()
        if not reply:
            assert self._process.stderr is not None
            self._process.wait(END_SECONDS)
            raise EmulationError(f"the switch has ended: {self._process.stderr.read().strip() or 'without a message'}")
        return reply

    def close(self) -> None:
        process = self._process
        with contextlib.suppress(BrokenPipeError):
            process.__exit__(None, None, None)


class SwitchFabric:
    """A fabric in its own process.

    Each host's link is also limited by a token bucket if the kernel has one: then senders wait, as at a real interface,
    instead of losing packets that are sent too fast.
    """

    header_bytes = 0

    def __init__(self, network: Network, hosts: Sequence[EmulatedHost], seed: int) -> None:
        self._network = network
        self._hosts = hosts
        self._switch = Switch()
        try:
            for line in self._script(seed):
                self._switch.ask(line)
            for number, host in enumerate(hosts):
                ip(host.namespace, self._host_lines(number))
                agree_on_tcp(host)
                self._hold_back(number, network.hosts[number])
        except BaseException:
            self.close()
            raise

    def _script(self, seed: int) -> Iterator[str]:
        network, count = self._network, len(self._hosts)
        yield f"seed {seed}"
        yield f"offload {int(joins(network))}"
        for number, (host, line) in enumerate(zip(self._hosts, network.hosts, strict=True)):
            up, down = line.up_bits_per_second, line.down_bits_per_second
            yield f"host {DIRECTORY / host.namespace} {up} {down} {queue_bytes(network, number)}"
        for a, b in permutations(range(count), 2):
            path = network.path(a, b)
            yield f"path {a} {b} {path.round_trip_seconds / 2} {path.jitter_seconds} {path.loss}"
        yield from shared_lines(network)
        yield "open"

    def _host_lines(self, number: int) -> Iterator[str]:
        host = self._hosts[number]
        largest = max(joined_bytes(slowest(self._network)), 2 * MTU_BYTES)
        yield "link set lo up"
        yield f"link set {host.interface} addrgenmode none"  # ineffective together with `up`
        yield f"link set {host.interface} mtu {MTU_BYTES} gso_max_size {largest} txqueuelen 2000 up"
        yield f"address add {host.address}/24 dev {host.interface}"

    def _hold_back(self, number: int, line: Host) -> None:
        host, usual = self._hosts[number], self._network.hosts[number]
        rates = line.up_bits_per_second, usual.up_bits_per_second
        with contextlib.suppress(EmulationError):  # a kernel without token buckets; the switch limits the rate anyway
            tc(host.namespace, [bucket(host.interface, *rates, SOCKETS_QUEUE_BYTES)])

    def cut(self, a: int, b: int) -> None:
        self._switch.ask(f"cut {a} {b}")

    def heal(self, a: int, b: int) -> None:
        self._switch.ask(f"heal {a} {b}")

    def set_line(self, host: int, line: Host) -> None:
        self._switch.ask(f"rate {host} {line.up_bits_per_second} {line.down_bits_per_second}")
        self._hold_back(host, line)

    def stats(self) -> dict[str, Any]:
        """cpu_seconds, packets, IP bytes, and dropped packets: dropped_full, dropped_lost, dropped_cut.

        late_seconds: mean delay of packets beyond their scheduled time.
        """
        stats: dict[str, Any] = json.loads(self._switch.ask("stats"))
        return stats

    def cpu_seconds(self) -> float:
        return float(self.stats()["cpu_seconds"])

    def close(self) -> None:
        self._switch.close()


def shared_lines(network: Network) -> Iterator[str]:
    """The switch's configuration of shared links: each of them, then the pairs that use it."""
    numbers: dict[tuple[str, str], int] = {}
    for a, b in permutations(range(len(network.hosts)), 2):
        path, way = network.path(a, b), (network.hosts[a].site, network.hosts[b].site)
        if path.bits_per_second is None:
            continue
        if way not in numbers:
            numbers[way] = len(numbers)
            yield f"shared {path.bits_per_second} {line_queue_bytes(path.bits_per_second, path.round_trip_seconds)}"
        yield f"through {a} {b} {numbers[way]}"


def slowest(network: Network) -> float:
    own = [min(host.up_bits_per_second, host.down_bits_per_second) for host in network.hosts]
    return min(own + [path.bits_per_second for path in _paths(network) if path.bits_per_second is not None])


def joins(network: Network) -> bool:
    """Whether hosts may join several segments in one packet: not if each may be lost or late separately."""
    alone = any(path.loss or path.jitter_seconds for path in _paths(network))
    return not alone and joined_bytes(slowest(network)) >= 2 * MTU_BYTES


def _paths(network: Network) -> list[NetworkPath]:
    return [network.path(a, b) for a, b in permutations(range(len(network.hosts)), 2)]
