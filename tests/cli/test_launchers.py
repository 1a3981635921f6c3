"""Options of elastic runs: what is read, and what is refused with the line to write instead."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from support.command_line import refusal

from gossamer.base.system import LOOPBACK_INTERFACE
from gossamer.cli.emulation import PORT, Emulation
from gossamer.cli.launchers import check_emulation, elastic_starter, read_elasticity
from gossamer.cli.options import ElasticOptions, Encryption, Machines, WorkerCount, read_address
from gossamer.launcher.job import Elasticity, InvitationOptions, Job, Serving, WorkerRange, read_worker_range
from gossamer.observe.live import LiveView
from gossamer.observe.telemetry import MachineDesk
from gossamer.plan.emulation import EmulationPlan
from gossamer.plan.emulation.capabilities import NO_RELAYS
from gossamer.plan.emulation.namespaces import DIRECTORY, EmulatedHost

ONE = Machines(None, 1, 0, None)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('was started')")
    Path("token").write_bytes(os.urandom(32))
    Path("token").chmod(0o600)


def test_a_plain_number_of_workers_stays_a_fixed_job() -> None:
    assert WorkerCount().convert("4", None, None) == 4
    assert WorkerCount().convert(2, None, None) == 2
    assert read_elasticity(4, ONE, ElasticOptions(), servers=2, network_text="1gbit") is None


def test_a_range_listens_on_loopback_unless_an_interface_or_an_address_is_named() -> None:
    workers = WorkerCount().convert("2:8", None, None)
    assert workers == WorkerRange(least=2, most=8, initial=8)
    for machines, listen, expected in (
        (ONE, None, ("127.0.0.1", 0)),
        (Machines(LOOPBACK_INTERFACE, 1, 0, None), None, ("127.0.0.1", 0)),
        (ONE, ("10.0.0.1", 29600), ("10.0.0.1", 29600)),
    ):
        found = read_elasticity(workers, machines, ElasticOptions(listen=listen))
        assert found is not None
        assert (found.listen, found.coordinator, found.range) == (expected, None, workers)


def test_a_worker_that_joins_has_a_coordinator_elsewhere() -> None:
    found = read_elasticity(3, ONE, ElasticOptions(join=("10.0.0.1", 29600)), token_file=Path("token"))
    assert found is not None
    assert (found.coordinator, found.listen, found.range.initial) == (("10.0.0.1", 29600), None, 3)


INSIDE, OUTSIDE = ("10.0.0.1", 1), ("203.0.113.1", 1)


@pytest.mark.parametrize(
    ("listen", "public", "options", "seals"),
    [
        (("127.0.0.1", 1), (), {}, False),
        (("::1", 1), (), {}, False),
        (("localhost", 1), (), {}, False),
        (INSIDE, (), {}, True),
        (OUTSIDE, (), {}, True),
        (("name.invalid", 1), (), {}, True),
        (INSIDE, (), {"plaintext": True}, False),
        (INSIDE, (), {"private": ("10.0.0.0/8",)}, False),
        (INSIDE, (), {"private": ("192.168.0.0/16", "10.0.0.0/24")}, False),
        (INSIDE, (), {"private": ("10.0.1.0/24",)}, True),
        (("fd00::1", 1), (), {"private": ("10.0.0.0/8",)}, True),
        (("fd00::1", 1), (), {"private": ("fd00::/8",)}, False),
        (INSIDE, (OUTSIDE,), {"private": ("10.0.0.0/8",)}, True),
        (INSIDE, (("name.invalid", 1),), {"private": ("10.0.0.0/8",)}, True),
        (("127.0.0.1", 1), (OUTSIDE,), {}, True),
    ],
)
def test_workers_encrypt_once_a_run_leaves_the_machine_and_each_named_private_network(
    listen: tuple[str, int], public: tuple[tuple[str, int], ...], options: dict[str, Any], seals: bool
) -> None:
    private = tuple(ipaddress.ip_network(each) for each in options.get("private", ()))
    elastic = ElasticOptions(
        listen=listen,
        invitation=InvitationOptions(addresses=public),
        encryption=Encryption(options.get("plaintext", False), private),
    )
    found = read_elasticity(WorkerCount().convert("2:8", None, None), ONE, elastic)
    assert found is not None
    assert found.seals is seals


def test_a_relay_seals_everywhere_and_certificates_replace_sealing() -> None:
    for elastic, tls in (
        (ElasticOptions(listen=("127.0.0.1", 1), relay=True), None),
        (ElasticOptions(listen=OUTSIDE), Path("certificates")),
    ):
        found = read_elasticity(WorkerCount().convert("2:8", None, None), ONE, elastic, tls=tls)
        assert found is not None
        assert found.seals is (tls is None)


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:", ":80", "a:b", "a:70000", "a:" + "9" * 5000, "a:²"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="Write HOST:PORT"):
        read_address(text)
    assert read_address("[::1]:80") == ("::1", 80)


JOIN = ("--join", "10.0.0.1:29600")
TOKEN = ("--token-file", "token")


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--workers", "8:2"), "write 2:8"),
        (("--workers", "0:2"), "at least 1 worker"),
        (("--workers", "2:"), "such as 2:8"),
        (("--workers", "0"), "0 is not in the range 1<=x<=65536"),
        (JOIN, "add --token-file FILE"),
        ((*JOIN, *TOKEN, "--workers", "2:4"), "such as --workers 4"),
        ((*JOIN, *TOKEN, "--servers", "1"), "the run's first launcher starts its servers"),
        ((*JOIN, *TOKEN, "--network", "1gbit"), "other machines cannot reach them: leave out --join"),
        (("--workers", "2:4", "--listen", "10.0.0.1:1", "--network", "1gbit"), "leave out --listen"),
        ((*JOIN, *TOKEN, "--listen", "10.0.0.1:1"), "write --relay and --listen"),
        ((*JOIN, *TOKEN, "--nnodes", "2", "--rendezvous", "a:1"), "and the others with --join HOST:PORT"),
        (("--join", "10.0.0.1", *TOKEN), "Write HOST:PORT"),
        ((*JOIN, "--token-file", "none"), "create one for a new run"),
        (("--workers", "2:4", "--servers", "1", "--relay"), "leave out --relay"),
        (("--workers", "2:4", "--servers", "1", "--listen", "10.0.0.1:1"), "Add --tls FOLDER"),
        (("--workers", "2:4", "--rendezvous", "a:1"), "start the first with --workers 2:4 --listen HOST:PORT"),
        (("--listen", "10.0.0.1:1"), "add --workers MIN:MAX"),
        (("--plaintext",), "--plaintext is for runs on several machines"),
        (("--private-network", "10.0.0.0/8"), "or --nnodes N"),
        (("--workers", "2:4", "--private-network", "10.0.0.0/33"), "such as 10.0.0.0/8"),
        (("--workers", "2:4", "--private-network", "10.0.0.1/8"), "such as 10.0.0.0/8"),
        (("--workers", "2:4", "--relay", "--plaintext"), "leave out --plaintext"),
        ((*JOIN, *TOKEN, "--plaintext"), "first launcher decides about encryption"),
        (("--workers", "2:4", "--fault", "kill(4, at=1)"), "there is no 4; 4 workers are numbered from 0 to 3"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(options: tuple[str, ...], hint: str) -> None:
    said = refusal("run", *options, "train.py")
    assert hint in " ".join(said.split())
    assert "was started" not in said
    assert not Path("runs").exists()


def test_on_emulated_hosts_the_coordinator_is_on_the_first_and_workers_meet_nowhere_else(tmp_path: Path) -> None:
    hosts = [EmulatedHost(namespace=f"lab-{k}", address=f"10.77.0.{k}") for k in (1, 2)]
    testbed = SimpleNamespace(hosts=hosts, header_bytes=14)
    emulation = Emulation(testbed=testbed)  # type: ignore[arg-type]
    elasticity = Elasticity(range=read_worker_range("1:2"))
    job = Job(script=Path("train.py"), logs=tmp_path / "logs")
    start = elastic_starter(job, elasticity, emulation, LiveView(tmp_path, ()), MachineDesk())
    placed, elastic = start.args  # type: ignore[attr-defined]
    assert (placed.hosts, placed.interface) == ((DIRECTORY / "lab-1", DIRECTORY / "lab-2"), "eth0")
    assert (elastic.listen, elastic.network) == (("10.77.0.1", PORT), DIRECTORY / "lab-1")
    plain = elastic_starter(job, elasticity, Emulation(), LiveView(tmp_path, ()), MachineDesk())
    assert plain.args[1] == elasticity  # type: ignore[attr-defined]


def test_on_emulated_hosts_the_servers_of_an_elastic_run_follow_the_most_workers(tmp_path: Path) -> None:
    hosts = [EmulatedHost(namespace=f"lab-{k}", address=f"10.77.0.{k}") for k in range(1, 5)]
    testbed = SimpleNamespace(hosts=hosts, header_bytes=14)
    emulation = Emulation(testbed=testbed)  # type: ignore[arg-type]
    job, elasticity = Job(script=Path("train.py"), logs=tmp_path), Elasticity(range=read_worker_range("1:3:1"))
    live = LiveView(tmp_path, ())
    start = elastic_starter(job, elasticity, emulation, live, None, serving=Serving(servers=1))
    assert start.keywords["serving"].endpoints == (f"10.77.0.4:{PORT + 1}",)  # type: ignore[attr-defined]


def test_an_emulation_that_would_slow_nothing_is_refused() -> None:
    paced, real = EmulationPlan(emulation="paced", reason="no right"), EmulationPlan(emulation="kernel")
    elasticity = Elasticity(range=read_worker_range("1:2"))
    with pytest.raises(click.UsageError, match=r"approximated here \(no right\)"):
        check_emulation(elasticity, paced)
    for harmless in ((elasticity, real), (elasticity, None), (None, paced)):
        check_emulation(*harmless)


def test_an_elastic_run_on_a_network_with_relays_needs_its_own() -> None:
    elasticity = Elasticity(range=read_worker_range("1:2"))
    with pytest.raises(click.UsageError, match="add --relay"):
        check_emulation(elasticity, EmulationPlan(emulation="paced", reason=NO_RELAYS))
