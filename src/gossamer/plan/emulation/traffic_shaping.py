"""Traffic shaping: the kernel's token bucket filter, which holds a device to a rate, and the sizes of queues."""

from __future__ import annotations

from gossamer.comm.network import Network
from gossamer.comm.network.parse import UNLIMITED_BITS_PER_SECOND

MTU_BYTES = 1500
ETHERNET_HEADER_BYTES = 14
LARGEST_JOINED_BYTES = 65536
BURST_SECONDS = 0.001
HEADERS_FACTOR = 1.1  # a joined packet counts with every segment's headers; larger than the burst, it is cut up at once
QUEUE_SECONDS = 0.01
LEAST_QUEUE_BYTES = 256 << 10
SOCKETS_QUEUE_BYTES = 8 << 20  # behind a host's own line senders wait: their sockets bound what they hold


def joined_bytes(bits_per_second: float) -> int:
    """The largest packet that a host hands over unsegmented (GSO): about a millisecond's worth.

    Large packets cost far less to move; on slow lines they would keep others waiting.
    """
    return min(LARGEST_JOINED_BYTES, int(bits_per_second / 8 * BURST_SECONDS))


def queue_bytes(network: Network, host: int) -> int:
    """The queue of one line: the bandwidth-delay product of its longest path, ten milliseconds at least."""
    line = network.hosts[host]
    others = [other for other in range(len(network.hosts)) if other != host]
    longest = max((network.path(host, other).round_trip_seconds for other in others), default=0.0)
    fastest = max(line.up_bits_per_second, line.down_bits_per_second)
    return line_queue_bytes(fastest, longest)


def line_queue_bytes(bits_per_second: float, round_trip_seconds: float) -> int:
    """The same for a line whose longest path is known."""
    return max(LEAST_QUEUE_BYTES, int(bits_per_second / 8 * max(round_trip_seconds, QUEUE_SECONDS)))


def bucket(device: str, bits_per_second: float, limit_bytes: int, header_bytes: int = 0) -> str:
    """The `tc` line that holds `device` to a rate of IP bytes; header_bytes: what it counts on top of each packet."""
    if bits_per_second >= UNLIMITED_BITS_PER_SECOND:
        return f"qdisc replace dev {device} root pfifo limit 10000"
    rate = round(bits_per_second * (MTU_BYTES + header_bytes) / MTU_BYTES)
    burst = max(2 * (MTU_BYTES + header_bytes), int(joined_bytes(bits_per_second) * HEADERS_FACTOR))
    return f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst}b limit {limit_bytes}b"
