"""Vitals: what a process and its machine use and lack, from counters that the system keeps anyway.

All are gauges or rates, so that a mean of several is one, too.

Of a process: cpu_share (cores), cpu_wait (share of time that its main thread was ready and had no core), rss (bytes),
throttled (share of time that its group was denied the processors), gc_seconds (of garbage collection, a second),
gpu_memory (bytes). Of a machine: load, busy and steal (shares of all cores), pressure (share of time that something
waited for a core), memory (bytes used), sent and received (bytes a second, without loopback), retransmits (TCP segments
a second). What the system does not tell is left out.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
Readings = dict[str, float]
Reader = Callable[[], Readings]
CGROUP = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # seconds in a unit of versions 2 and 1


class VitalsSampler:
    """counters: ever growing sums, of which a sample tells the rates since the one before; gauges: told as they are."""

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
    """Of this process. collector: times its garbage collections."""

    def counters() -> Readings:
        found = {"cpu_share": time.process_time(), "gc_seconds": collector.seconds}
        return found | waiting_for_core(ROOT) | throttled(ROOT)

    return VitalsSampler(counters, lambda: resident(ROOT) | gpu_memory())


def machine_vitals() -> VitalsSampler:
    """Of this machine, as far as this process's namespaces show it."""

    def counters() -> Readings:
        return processor_shares(ROOT) | pressure(ROOT) | traffic(ROOT) | retransmits(ROOT)

    return VitalsSampler(counters, lambda: load() | memory(ROOT))


class CollectorClock:
    """Adds up the seconds of garbage collection, while it is installed. Less than a microsecond a collection."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def install(self) -> Callable[[], None]:
        """Begin; returns the function that ends it."""
        gc.callbacks.append(self)
        return lambda: gc.callbacks.remove(self)

    def __call__(self, phase: str, about: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


# -- of a process ------------------------------------------------------------------------------------------------------


def waiting_for_core(root: Path) -> Readings:
    """Seconds that the main thread was ready to run and did not."""
    columns = _text(root / "proc/self/schedstat").split()
    return {"cpu_wait": int(columns[1]) * 1e-9} if len(columns) > 1 else {}


def throttled(root: Path) -> Readings:
    """Seconds that this process's control group was denied the processors, where it has a quota."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = "sys/fs/cgroup" if not controllers else f"sys/fs/cgroup/{controllers}"
        for folder in (root / mount / path.lstrip("/"), root / mount):  # within a container its path is another
            found = dict(_pairs(_text(folder / "cpu.stat")))
            for name, seconds in CGROUP.items():
                if name in found:
                    return {"throttled": found[name] * seconds}
    return {}


def resident(root: Path) -> Readings:
    columns = _text(root / "proc/self/statm").split()
    return {"rss": float(int(columns[1]) * os.sysconf("SC_PAGE_SIZE"))} if len(columns) > 1 else {}


def gpu_memory() -> Readings:
    """Bytes that torch has allocated on this process's device; asks nothing of a device that nobody uses."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {"gpu_memory": float(torch.cuda.memory_allocated())}


# -- of a machine ------------------------------------------------------------------------------------------------------


def load() -> Readings:
    with suppress(OSError, AttributeError):
        return {"load": os.getloadavg()[0]}
    return {}


def processor_shares(root: Path) -> Readings:
    """Seconds of all cores together that were used, and that a hypervisor took, over their number."""
    lines = _text(root / "proc/stat").splitlines()
    cores = sum(line.startswith("cpu") for line in lines) - 1
    if not lines or cores < 1:
        return {}
    ticks = [int(column) for column in lines[0].split()[1:]]
    user, nice, system, _, _, hard, soft, steal = ticks[:8]
    each = os.sysconf("SC_CLK_TCK") * cores
    return {"busy": (user + nice + system + hard + soft) / each, "steal": steal / each}


def pressure(root: Path) -> Readings:
    """Seconds in which something waited for a core."""
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
    """Bytes through all interfaces but loopback."""
    columns = [
        [int(column) for column in counted.split()]
        for name, separator, counted in (line.partition(":") for line in _text(root / "proc/self/net/dev").splitlines())
        if separator and name.strip() != "lo"
    ]
    if not columns:
        return {}
    return {"received": float(sum(each[0] for each in columns)), "sent": float(sum(each[8] for each in columns))}


def retransmits(root: Path) -> Readings:
    """TCP segments that were sent again."""
    names, counts = ([*line.split()] for line in _tcp_lines(root))
    found = dict(zip(names, counts, strict=False))
    return {"retransmits": float(found["RetransSegs"])} if "RetransSegs" in found else {}


def _tcp_lines(root: Path) -> tuple[str, str]:
    lines = [line for line in _text(root / "proc/self/net/snmp").splitlines() if line.startswith("Tcp:")]
    return (lines[0], lines[1]) if len(lines) > 1 else ("", "")


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    """The lines that are a name and a whole number, with or without a unit."""
    for line in text.splitlines():
        columns = line.split()
        if len(columns) > 1 and columns[1].isdigit():
            yield columns[0], int(columns[1])


def _text(path: Path) -> str:
    """Empty where the system has no such file, or it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _brief(value: float) -> float:
    """Four digits: these go into files once a second."""
    return float(f"{value:.4g}")
