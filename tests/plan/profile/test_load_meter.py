"""Load meter: whose the cores were, from planted counters of a kernel."""

import os

import pytest

from gossamer.plan.estimate.workload_profile import OtherLoad
from gossamer.plan.profile import load_meter
from gossamer.plan.profile.load_meter import LoadMeter, family_ticks, mean_load

SECOND = os.sysconf("SC_CLK_TCK")


class Kernel:
    """Its files in /proc, for machines of which everything is known."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.now = folder, 100.0
        (folder / "self").mkdir()
        (folder / "uptime").touch()
        monkeypatch.setattr(load_meter.time, "monotonic", lambda: self.now)

    def says(self, busy=0.0, idle=0.0, stolen=0.0, running=0.0, ready=0.0, **processes):
        """processes: p<number>=(parent, seconds)."""
        user, rest, lost = (int(each * SECOND) for each in (busy, idle, stolen))
        (self.folder / "stat").write_text(f"cpu  {user} 0 0 {rest} 7 0 0 {lost} {user} 0\ncpu0 1 2 3\n")
        (self.folder / "self" / "schedstat").write_text(f"{int(running * 1e9)} {int(ready * 1e9)} 12\n")
        for name, (parent, seconds) in processes.items():
            (self.folder / name[1:]).mkdir(exist_ok=True)
            fields = ["S", str(parent), *["0"] * 9, str(int(seconds * SECOND) - 2), "1", "1", "0", "20"]
            (self.folder / name[1:] / "stat").write_text(f"{name[1:]} (a (b) c) {' '.join(fields)}\n")


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return Kernel(tmp_path, monkeypatch)


def measured(kernel):
    """Two copies and a child of one keep 0.8 cores busy for 10 seconds, others 1.2."""
    kernel.says(busy=50, idle=3, running=3, ready=1, p10=(1, 5), p11=(10, 1), p12=(10, 1), p13=(11, 0.5), p20=(1, 9))
    meter = LoadMeter(10, kernel.folder)
    meter.start()
    kernel.now += 10
    kernel.says(busy=70, idle=3, running=7, ready=7, p10=(1, 5), p11=(10, 4), p12=(10, 4), p13=(11, 2.5), p20=(1, 21))
    return meter.stop()


def test_what_descendants_used_is_their_own_and_the_rest_is_others(kernel):
    assert measured(kernel) == OtherLoad(cores=2.0, own=0.8, other=1.2, stolen=0.0, running=0.4, ready=0.6)


def test_a_meter_that_leaves_out_children_is_noticed(kernel, monkeypatch):
    monkeypatch.setattr(load_meter, "_descends", lambda process, ancestor, parents: parents[process] == ancestor)
    with pytest.raises(AssertionError):
        test_what_descendants_used_is_their_own_and_the_rest_is_others(kernel)


def test_where_the_kernel_does_not_tell_nothing_is_known(kernel):
    meter = LoadMeter(10, kernel.folder / "nowhere")
    meter.start()
    kernel.now += 10
    assert meter.stop() == OtherLoad()
    assert meter.stop().slowdown == 1.0
    assert not meter.stop().is_much


def test_a_while_that_is_shorter_than_counters_tell_of_tells_nothing(kernel):
    kernel.says(busy=50)
    meter = LoadMeter(10, kernel.folder)
    meter.start()
    kernel.now += 0.1
    kernel.says(busy=51)
    assert meter.stop() == OtherLoad()


@pytest.mark.skipif(not load_meter.PROC.is_dir(), reason="not Linux")
def test_this_kernel_counts_this_process():
    before = family_ticks(load_meter.PROC, os.getpid())
    sum(number * number for number in range(3_000_000))
    assert family_ticks(load_meter.PROC, os.getpid()) >= before > 0


# -- what it takes out, in closed form: cores that are shared fairly


def fair(copies, others, cores, sleeps=0.0):
    """Threads that want a whole core but for `sleeps` of their time alone, and others that always want one."""
    alone = min(1.0, cores / copies)
    shared = min(1.0, cores / (copies + others))
    work = 1 - sleeps  # seconds of a core; passing time: sleeps + work / share
    passed, before = sleeps + work / shared, sleeps + work / alone
    rate = work / passed
    load = OtherLoad(
        cores=cores,
        own=copies * rate,
        other=min(others, cores - copies * rate),
        running=rate,
        ready=(work / shared - work) / passed,
    )
    return load, passed / before


FAIR = {
    "one beside one on one": (1, 1, 1),
    "one beside nothing": (1, 0, 2),
    "two beside two on two": (2, 2, 2),
    "four beside four on two": (4, 4, 2),
    "four that wait for each other only": (4, 0, 2),
    "one beside one on two": (1, 1, 2),
    "one that mostly sleeps": (1, 3, 1, 0.9),
}


def check_slowdown(case, slowdown=lambda load: load.slowdown):
    load, truth = fair(*FAIR[case])
    assert slowdown(load) == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("case", FAIR)
def test_without_others_steps_take_what_they_take_alone(case):
    check_slowdown(case)


def by_wall_time(load):
    """All that was waited for is others' doing, and sleep is work."""
    return 1 / load.running


@pytest.mark.parametrize("case", ["four that wait for each other only", "one that mostly sleeps"])
def test_a_correction_by_processor_time_alone_is_noticed(case):
    with pytest.raises(AssertionError):
        check_slowdown(case, by_wall_time)


def test_what_a_hypervisor_took_is_taken_out():
    assert OtherLoad(cores=1, own=0.7, stolen=0.3, running=1.0).slowdown == pytest.approx(1 / 0.7)


def test_the_mean_of_copies():
    assert mean_load([OtherLoad(own=1.0), OtherLoad(own=2.0, cores=2)]) == OtherLoad(own=1.5, cores=1.0)
