from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.comm.network import Host, Network, read_network
from gossamer.comm.network import Path as NetworkPath
from gossamer.plan.emulation import capabilities
from gossamer.plan.emulation.capabilities import NO_RELAYS, EmulationPlan, needs_switch, plan, reentering
from gossamer.plan.emulation.namespaces import EmulationError, call

RATES = read_network("100mbit", 2)
DELAYS = read_network("100mbit,20ms", 2)


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has everything."""
    (tmp_path / "there").touch()
    monkeypatch.setattr(capabilities.system, "IS_LINUX", True)
    monkeypatch.setattr(capabilities, "COMMANDS", ("sh",))
    monkeypatch.setattr(capabilities, "TUN", tmp_path / "there")
    monkeypatch.setattr(capabilities, "PROGRAM", tmp_path / "there")
    monkeypatch.setattr(capabilities, "_works", lambda *command: True)


@pytest.mark.parametrize(
    ("spec", "needs"),
    [("100mbit", False), ("100mbit,1ms", True), ("100mbit,jitter=1ms", True), ("100mbit,loss=1%", True)],
)
def test_the_kernel_alone_does_rates(spec: str, needs: bool) -> None:
    assert needs_switch(read_network(spec, 2)) is needs
    assert plan(read_network(spec, 2)) == EmulationPlan(emulation="switch" if needs else "kernel")


def test_the_kernel_alone_has_no_lines_that_hosts_share() -> None:
    hosts = tuple(Host(up_bits_per_second=1e9, down_bits_per_second=1e9, site=site) for site in "aab")
    shared = Network(hosts=hosts, paths={frozenset("ab"): NetworkPath(bits_per_second=1e8)})
    assert plan(shared) == EmulationPlan(emulation="switch")
    assert plan(Network(hosts=hosts[:2], paths=shared.paths)) == EmulationPlan(
        emulation="kernel"
    )  # nobody is at the other end


def test_a_world_of_one_needs_no_switch() -> None:
    assert not needs_switch(read_network("100mbit,20ms", 1))


def test_users_enter_a_namespace_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "_works", lambda *command: "--user" in command)
    assert plan(DELAYS) == EmulationPlan(emulation="switch", reenters=True)
    assert reentering(["python", "a b"])[-2:] == ["python", "a b"]


def test_a_missing_part_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capabilities, "PROGRAM", tmp_path / "absent")
    assert plan(RATES).emulation == "kernel"
    assert plan(DELAYS).emulation == "paced"
    assert "gossamer-switch was not built (install a C++ compiler" in plan(DELAYS).reason

    monkeypatch.setattr(capabilities, "PROGRAM", tmp_path / "there")
    monkeypatch.setattr(capabilities, "TUN", tmp_path / "absent")
    assert plan(RATES).emulation == "kernel"
    assert "absent is missing or cannot be opened (modprobe tun" in plan(DELAYS).reason

    monkeypatch.setattr(capabilities, "_works", lambda *command: False)
    assert plan(RATES).emulation == "paced"
    assert "neither network namespaces nor user namespaces" in plan(RATES).reason

    monkeypatch.setattr(capabilities, "COMMANDS", ("sh", "no-such-command"))
    assert "missing commands: no-such-command (install iproute2" in plan(RATES).reason

    monkeypatch.setattr(capabilities.system, "IS_LINUX", False)
    assert "need Linux" in plan(RATES).reason


def test_relays_are_emulated_in_runs_that_relay() -> None:
    hosts = (Host(up_bits_per_second=1e9, down_bits_per_second=1e9),) * 3
    relayed = Network(hosts=hosts, relayed={frozenset((1, 2)): 0})
    assert plan(relayed, relays=True) == plan(Network(hosts=hosts)) == EmulationPlan(emulation="kernel")
    assert plan(relayed) == EmulationPlan(emulation="paced", reason=NO_RELAYS)
    assert plan(Network(hosts=hosts), relays=True).emulation == "kernel"  # a relay that no pair needs


def test_commands_that_fail_give_the_reason() -> None:
    assert call(["cat"], "text") == "text"
    with pytest.raises(EmulationError, match="`sh -c echo no >&2; exit 3` failed: no"):
        call(["sh", "-c", "echo no >&2; exit 3"])
    with pytest.raises(EmulationError, match="the command no-such-command is missing"):
        call(["no-such-command"])
