"""Small programs that run on the hosts of an emulated network, and what they measure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from gossamer.plan.emulation import EmulatedNetwork
from gossamer.plan.emulation.namespaces import DIRECTORY

PAYLOAD_BYTES = 1472

COUNTERS = """
def counters():
    line = next(line for line in open("/proc/self/net/dev") if "eth0:" in line)
    return [int(field) for field in line.partition(":")[2].split()[:2]]
"""

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 7000))
print("up", flush=True)
while True:
    heard, who = server.recvfrom(16)
    server.sendto(heard, who)
"""

# UDP_SEGMENT: one call hands over many packets of PAYLOAD_BYTES. Much waits in the socket (SO_SNDBUFFORCE), so that the
# line stays busy while this program is not scheduled.
FLOOD = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setsockopt(socket.SOL_UDP, 103, 1472)
sender.setsockopt(socket.SOL_SOCKET, 32, int(sys.argv[3]))
data = bytes(1472 * int(sys.argv[2]))
while True:
    sender.sendto(data, (sys.argv[1], 7001))
"""

# Packets may arrive joined; every datagram's payload is whole all the same. The rate is the median over many stretches
# of a tenth of a second (longer where that is few packets): what the line does while nobody stops this machine.
RATE = (
    COUNTERS
    + """
import socket, statistics, sys, time
headers, seconds = int(sys.argv[1]), float(sys.argv[2])
held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
held.bind(("", 7001))
def payload():
    heard, packets = counters()
    return heard - headers * packets
idle = payload()
print("up", flush=True)
while payload() < idle + 1472 * 12:
    time.sleep(0.005)
samples, end = [], time.perf_counter() + seconds
while not samples or samples[-1][0] < end:
    samples.append((time.perf_counter(), payload()))
    time.sleep(0.005)
rates, last = [], 0
for began, before in samples:
    while samples[last][0] - began < 0.1 or samples[last][1] - before < 1472 * 60:
        last += 1
        if last == len(samples):
            break
    else:
        rates.append((samples[last][1] - before) / (samples[last][0] - began))
        continue
    break
rates = rates or [(samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])]
print(statistics.median(rates) / 1472 * 1500 * 8, flush=True)
"""
)

PING = """
import socket, sys, time
address, count, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asker.settimeout(patience)
best = None
for number in range(count):
    began = time.perf_counter()
    asker.sendto(bytes([number]), (address, 7000))
    try:
        while asker.recv(16) != bytes([number]):
            pass
    except TimeoutError:
        continue
    best = min(best or 9e9, time.perf_counter() - began)
print(best)
"""

COLLECT = """
import socket, sys
held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
held.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
held.bind(("", 7002))
print("up", flush=True)
seen, ends = [], 0
try:
    while ends < 50:  # all of them: a packet that finds nobody here would be answered, and the answer counted
        number = int.from_bytes(held.recv(4), "big")
        if number:
            seen.append(number)
        else:
            ends += 1
            held.settimeout(1.0)
except TimeoutError:
    pass
print(*seen)
"""

NUMBERED = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in [*range(1, int(sys.argv[2]) + 1), *[0] * 50]:  # the end is told often enough to arrive
    sender.sendto(number.to_bytes(4, "big"), (sys.argv[1], 7002))
"""

SINK = """
import socket, sys, time
idle, seconds = float(sys.argv[1]), float(sys.argv[2])
with socket.create_server(("", 7003)) as server:
    print("up", flush=True)
    stream, _ = server.accept()
def hear(until):
    heard = 0
    while time.perf_counter() < until:
        heard += len(stream.recv(1 << 16))
    return heard
hear(time.perf_counter() + idle)
began = time.perf_counter()
heard = hear(began + seconds)
print(heard / 1448 * 1500 * 8 / (time.perf_counter() - began), flush=True)
"""

SOURCE = """
import socket, sys
stream = socket.create_connection((sys.argv[1], 7003))
while True:
    stream.sendall(bytes(1 << 16))
"""


@contextmanager
def on(lab: EmulatedNetwork, host: int, program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A program that runs on a host for the length of the block."""
    command = [*lab.hosts[host].prefix, sys.executable, "-S", "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def answering(lab: EmulatedNetwork, host: int) -> Iterator[None]:
    with on(lab, host, ECHO) as echo:
        assert line(echo) == "up"
        yield


def round_trip_seconds(
    lab: EmulatedNetwork, a: int, b: int, count: int = 8, patience_seconds: float = 2.0
) -> float | None:
    """The shortest of some, for one byte; None where no answer came. Host b must be `answering`."""
    with on(lab, a, PING, lab.hosts[b].address, count, patience_seconds) as ping:
        best = line(ping)
    return None if best == "None" else float(best)


def bits_per_second(lab: EmulatedNetwork, a: int, b: int, seconds: float = 1.0) -> float:
    """The rate of IP bytes from a to b while a sends as much as it can, by b's interface counters."""
    slowest = min(lab.network.hosts[a].up_bits_per_second, lab.network.hosts[b].down_bits_per_second)
    headers = 28 + (14 if lab.emulation == "kernel" else 0)
    with on(lab, b, RATE, headers, seconds) as counting:
        assert line(counting) == "up"
        with on(
            lab, a, FLOOD, lab.hosts[b].address, 40 if slowest > 50e6 else 1, max(1 << 17, int(slowest / 8 * 0.02))
        ):
            return float(line(counting))


def streams_bits_per_second(
    lab: EmulatedNetwork, *pairs: tuple[int, int], idle: float = 0.4, seconds: float = 1.0
) -> list[float]:
    """The rates of IP bytes of TCP streams that all go on at once, from a to b for each pair, once they are `idle` old.

    Nobody receives twice.
    """
    with ExitStack() as running:
        sinks = [running.enter_context(on(lab, b, SINK, idle, seconds)) for _, b in pairs]
        assert [line(sink) for sink in sinks] == ["up"] * len(pairs)
        for a, b in pairs:
            running.enter_context(on(lab, a, SOURCE, lab.hosts[b].address))
        return [float(line(sink)) for sink in sinks]


def arrived(lab: EmulatedNetwork, a: int, b: int, count: int) -> list[int]:
    """Which of `count` numbered packets from a came to b."""
    with on(lab, b, COLLECT) as collect:
        assert line(collect) == "up"
        with on(lab, a, NUMBERED, lab.hosts[b].address, count) as numbered:
            assert numbered.wait() == 0
            return [int(number) for number in line(collect).split()]


def left_by(pid: int) -> list[str]:
    """Network namespaces of an owner."""
    return [path.name for path in DIRECTORY.glob(f"gossamer-{pid}-*")]


def inhabitants(names: Iterable[str]) -> str:
    """Processes in network namespaces."""
    listing = [
        subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True) for name in names
    ]
    return "".join(each.stdout for each in listing)
