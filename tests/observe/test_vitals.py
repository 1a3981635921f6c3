"""Vitals: rates of counters that the system keeps, from a made-up /proc, and nothing where it tells nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from gossamer.observe import vitals
from gossamer.observe.vitals import CollectorClock, VitalsSampler

FILES = {
    "proc/self/schedstat": "5000000000 1500000000 77\n",
    "proc/self/cgroup": "0::/runs/one\n",
    "sys/fs/cgroup/runs/one/cpu.stat": "usage_usec 99\nnr_throttled 3\nthrottled_usec 250000\n",
    "proc/self/statm": "900 100 3 1 0 5 0\n",
    "proc/stat": "cpu  100 0 50 800 10 5 5 40 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\nintr 5\n",
    "proc/pressure/cpu": "some avg10=1.0 avg60=1.0 avg300=1.0 total=7000000\nfull avg10=0 total=1\n",
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n",
    "proc/self/net/dev": "Inter-| Receive\n face |bytes\n    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n"
    "  eth0: 70 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n  eth1: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n",
    "proc/self/net/snmp": "Ip: Forwarding\nIp: 1\nTcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 12 0\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_each_file_is_read_as_the_system_writes_it(root: Path) -> None:
    assert vitals.waiting_for_core(root) == {"cpu_wait": 1.5}
    assert vitals.throttled(root) == {"throttled": 0.25}
    assert vitals.processor_shares(root) == pytest.approx({"busy": 0.8, "steal": 0.2})
    assert vitals.pressure(root) == {"pressure": 7.0}
    assert vitals.memory(root) == {"memory": 600 * 1024}
    assert vitals.traffic(root) == {"received": 71.0, "sent": 32.0}
    assert vitals.retransmits(root) == {"retransmits": 12.0}
    assert vitals.resident(root)["rss"] >= 100 * 4096


def test_older_control_groups_count_in_nanoseconds(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 1\nthrottled_time 500000000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert vitals.throttled(tmp_path) == {"throttled": 0.5}


READERS = (
    vitals.waiting_for_core,
    vitals.throttled,
    vitals.processor_shares,
    vitals.pressure,
    vitals.memory,
    vitals.traffic,
    vitals.retransmits,
    vitals.resident,
)


@pytest.mark.parametrize("read", READERS)
def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path, read: object) -> None:
    assert callable(read)
    assert read(tmp_path) == {}


def test_a_sample_has_rates_since_the_one_before() -> None:
    times, counts = iter([0.0, 2.0, 4.0, 4.0]), iter([10.0, 11.0, 11.0, 11.0])
    sampler = VitalsSampler(lambda: {"sent": next(counts)}, lambda: {"load": 3.0}, clock=lambda: next(times))
    assert [sampler.sample() for _ in range(3)] == [
        {"sent": 0.5, "load": 3.0},
        {"sent": 0.0, "load": 3.0},
        {"load": 3.0},
    ]


@pytest.fixture
def collector() -> Iterator[CollectorClock]:
    clock = CollectorClock()
    end = clock.install()
    yield clock
    end()


def test_garbage_collection_is_timed_while_it_is_watched(collector: CollectorClock) -> None:
    assert collector.seconds == 0.0 or gc.isenabled()
    gc.collect()
    assert collector.seconds > 0.0


def test_this_machine_tells_of_itself() -> None:
    assert vitals.process_vitals(CollectorClock()).sample()["cpu_share"] >= 0.0
    assert "load" in vitals.machine_vitals().sample()


def test_memory_of_a_gpu_is_counted_from_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker allocates on cuda:3. The current device is of each thread, and 0 in the sampler's."""
    current = threading.local()
    current.device = 3

    def allocated(device: int | None = None) -> int:
        return {3: 5 * 2**30}.get(getattr(current, "device", 0) if device is None else device, 0)

    for name, value in {"is_available": True, "is_initialized": True, "device_count": 4}.items():
        monkeypatch.setattr(torch.cuda, name, partial(bool if value is True else int, value))
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(vitals.gpu_memory).result(60) == vitals.gpu_memory() == {"gpu_memory": 5.0 * 2**30}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert vitals.gpu_memory() == {}
