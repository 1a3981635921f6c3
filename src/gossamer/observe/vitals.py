"""Vitals: resource usage of a process and its machine, from counters of the system.

All are gauges or rates, so that a mean of several is valid, too.

Of a process: cpu_share (cores), cpu_wait (share of time that its main thread was ready without a core), rss (bytes),
throttled (share of time that the CPU quota of its cgroup was used up), gc_seconds (seconds of garbage collection per
second), gpu_memory (bytes). Of a machine: load, busy and steal (shares of all cores), pressure (share of time that a
task waited for a core), memory (bytes used), sent and received (bytes per second, without loopback), retransmits (TCP
segments per second). Values that the system does not provide are left out.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from gossamer.base import system

ROOT = Path("/")
Readings = dict[str, float]
Reader = Callable[[], Readings]
CGROUP = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # seconds per unit, cgroup versions 2 and 1


class VitalsSampler:
    """Samples vitals. counters: growing sums, reported as rates since the last sample; gauges: reported unchanged."""

    def __init__(self, counters: Reader, gauges: Reader, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._gauges, self._clock = counters, gauges, clock
        self._at, self._before = clock(), counters()

    def sample(self) -> Readings:
        """The vitals since the last sample."""
        at, counted = self._clock(), self._counters()
        seconds, before = at - self._at, self._before
        self._at, self._before = at, counted
        if seconds <= 0:
            return self._gauges()
        rates = {name: max(0.0, counted[name] - before[name]) / seconds for name in counted if name in before}
        return {**{name: _brief(value) for name, value in rates.items()}, **self._gauges()}


def process_vitals(collector: CollectorClock) -> VitalsSampler:
    """Vitals of this process. collector: times its garbage collections."""

    def counters() -> Readings:
        found = {"cpu_share": time.process_time(), "gc_seconds": collector.seconds}
        return found | waiting_for_core(ROOT) | throttled(ROOT)

    return VitalsSampler(counters, lambda: resident(ROOT) | gpu_memory())


def machine_vitals() -> VitalsSampler:
    """Vitals of this machine, as visible in this process's namespaces."""

    def counters() -> Readings:
        return processor_shares(ROOT) | pressure(ROOT) | traffic(ROOT) | retransmits(ROOT)

    return VitalsSampler(counters, lambda: load() | memory(ROOT))


class CollectorClock:
    """Sums the seconds of garbage collection while it is installed. It costs less than a microsecond per collection."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def install(self) -> Callable[[], None]:
        """Install it. Return the function that removes it."""
        gc.callbacks.append(self)
        return lambda: gc.callbacks.remove(self)

    def __call__(self, phase: str, about: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


# -- of a process ------------------------------------------------------------------------------------------------------


def waiting_for_core(root: Path) -> Readings:
    """Seconds that the main thread was ready to run without a core."""
    columns = _text(root / "proc/self/schedstat").split()
    return {"cpu_wait": int(columns[1]) * 1e-9} if len(columns) > 1 else {}


def throttled(root: Path) -> Readings:
    """Seconds that this process's cgroup was throttled, if it has a quota."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = "sys/fs/cgroup" if not controllers else f"sys/fs/cgroup/{controllers}"
        for folder in (root / mount / path.lstrip("/"), root / mount):  # the path differs inside a container
            found = dict(_pairs(_text(folder / "cpu.stat")))
            for name, seconds in CGROUP.items():
                if name in found:
                    return {"throttled": found[name] * seconds}
    return {}


def resident(root: Path) -> Readings:
    columns = _text(root / "proc/self/statm").split()
    return {"rss": float(int(columns[1]) * system.page_bytes())} if len(columns) > 1 else {}


def gpu_memory() -> Readings:
    """Bytes that torch has allocated for this process, on all devices: the current one is that of the calling thread.
    An unused device is not initialized."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {"gpu_memory": float(sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))))}


# -- of a machine ------------------------------------------------------------------------------------------------------


def load() -> Readings:
    with suppress(OSError, AttributeError):
        return {"load": system.load_average()}
    return {}


def processor_shares(root: Path) -> Readings:
    """Busy and stolen seconds, summed over all cores and divided by their number."""
    lines = _text(root / "proc/stat").splitlines()
    cores = sum(line.startswith("cpu") for line in lines) - 1
    if not lines or cores < 1:
        return {}
    ticks = [int(column) for column in lines[0].split()[1:]]
    user, nice, kernel, _, _, hard, soft, steal = ticks[:8]
    each = system.clock_ticks_per_second() * cores
    return {"busy": (user + nice + kernel + hard + soft) / each, "steal": steal / each}


def pressure(root: Path) -> Readings:
    """Seconds in which a task waited for a core."""
    for line in _text(root / "proc/pressure/cpu").splitlines():
        if line.startswith("some") and "total=" in line:
            return {"pressure": int(line.rpartition("total=")[2]) * 1e-6}
    return {}


def memory(root: Path) -> Readings:
    found = {name.rstrip(":"): kilobytes for name, kilobytes in _pairs(_text(root / "proc/meminfo"))}
    if "MemTotal" not in found or "MemAvailable" not in found:
        return {}
    return {"memory": 1024.0 * (found["MemTotal"] - found["MemAvailable"])}


def traffic(root: Path) -> Readings:
    """Bytes through all interfaces except loopback."""
    columns = [
        [int(column) for column in counted.split()]
        for name, separator, counted in (line.partition(":") for line in _text(root / "proc/self/net/dev").splitlines())
        if separator and name.strip() != "lo"
    ]
    if not columns:
        return {}
    return {"received": float(sum(each[0] for each in columns)), "sent": float(sum(each[8] for each in columns))}


def retransmits(root: Path) -> Readings:
    """Retransmitted TCP segments."""
    names, counts = ([*line.split()] for line in _tcp_lines(root))
    found = dict(zip(names, counts, strict=False))
    return {"retransmits": float(found["RetransSegs"])} if "RetransSegs" in found else {}


def _tcp_lines(root: Path) -> tuple[str, str]:
    lines = [line for line in _text(root / "proc/self/net/snmp").splitlines() if line.startswith("Tcp:")]
    return (lines[0], lines[1]) if len(lines) > 1 else ("", "")


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    """The lines with a name and a whole number, with or without a unit."""
    for line in text.splitlines():
        columns = line.split()
        if len(columns) > 1 and columns[1].isdecimal():
            yield columns[0], int(columns[1])


def _text(path: Path) -> str:
    """Text of a file; empty if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _brief(value: float) -> float:
    """Four digits: these are written every few seconds."""
    return float(f"{value:.4g}")
