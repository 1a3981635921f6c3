"""Two machines, each a network namespace of its own, joined by one cable."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.nightly import nightly

from gossamer.launcher.coordinator import RUN_CARD

pytestmark = [
    pytest.mark.skipif(
        shutil.which("ip") is None or os.geteuid() != 0,
        reason="network namespaces need root and the ip command (Debian: iproute2)",
    ),
    pytest.mark.namespaces,
    pytest.mark.processes,
]

PORT = 29617
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TRAINING = """
import os, signal
from pathlib import Path
import gossamer, torch
from gossamer.train import checkpoint
world = gossamer.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.attach(model, optimizer, "TopK(density=0.1)") as session:
    for step in range(5):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lethal = Path("lethal")
        if step == 2 and world.rank == 1 and lethal.exists():
            lethal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
print("sealed", os.environ.get("GOSSAMER_SEAL", "no"))
print("digest", checkpoint.digest(model.parameters()), os.environ["GLOO_SOCKET_IFNAME"])
"""


@dataclass(frozen=True)
class Machine:
    name: str
    directory: Path

    def start(self, *options: str) -> subprocess.Popen[str]:
        gossamer = [sys.executable, "-c", "from gossamer.cli.main import main; main()"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *gossamer, "run", "--workers", "1", *options, "train.py"],
            cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """As on Debian, the first machine's own name means 127.0.1.1 on itself."""
    unique = uuid.uuid4().hex[:6]
    names, cables = [f"gossamer-{unique}-{end}" for end in "ab"], [f"g{unique}{end}" for end in "ab"]
    folders = [Path("/etc/netns", name) for name in names]
    created = [] if folders[0].parent.exists() else [folders[0].parent]
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add {cables[0]} type veth peer name {cables[1]}")
        for name, cable, address, folder in zip(names, cables, ADDRESSES, folders, strict=True):
            ip(f"link set {cable} netns {name}")
            ip(f"-n {name} addr add {address}/24 dev {cable}")
            ip(f"-n {name} link set {cable} up")
            ip(f"-n {name} link set lo up")
            folder.mkdir(parents=True)
            (folder / "resolv.conf").write_text("")
            first = "127.0.1.1" if address == ADDRESSES[0] else ADDRESSES[0]
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{first} first\n")
        yield [machine(name, tmp_path / name) for name in names]
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
        for folder in created:
            with contextlib.suppress(OSError):  # another run of this test needs it still
                folder.rmdir()


def machine(name: str, directory: Path) -> Machine:
    directory.mkdir()
    (directory / "train.py").write_text(TRAINING)
    return Machine(name, directory)


def together(machines: list[Machine], *options: str) -> tuple[str, str]:
    """What both printed, standard output and error together; both must end well."""
    shared = ("--nnodes", "2", *options)
    running = [each.start("--node-rank", str(place), *shared) for place, each in enumerate(machines)]
    try:
        said = ["\n".join(each.communicate(timeout=200)) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert [each.returncode for each in running] == [0, 0], "\n".join(said)
    return said[0], said[1]


def digest(said: str) -> str:
    """The last one; the interface that the worker chose is the machine's own cable."""
    *_, line = (line for line in said.splitlines() if "digest" in line)
    *_, found, interface = line.split()
    assert interface.startswith("g")
    return found


def check_they_trained_together(first: str, second: str, host: str, sealed: bool = True) -> None:
    assert digest(first) == digest(second)
    assert f"waiting for machine 1 to connect to {host}:{PORT}" in first
    assert all("workers agree             yes" in said for said in (first, second))
    assert all(("sealed 1" if sealed else "sealed no") in said for said in (first, second))
    assert ("connections between workers are encrypted" in first) is sealed
    assert "connections between workers are encrypted" not in second


def test_two_machines_train_together(machines: list[Machine]) -> None:
    first, second = together(machines, "--rendezvous", f"{ADDRESSES[0]}:{PORT}")
    check_they_trained_together(first, second, ADDRESSES[0])
    assert "--token-file FILE, on all machines, rejects them" in first


def test_on_a_network_of_the_user_two_machines_do_not_encrypt(machines: list[Machine]) -> None:
    network = f"{ADDRESSES[0]}/32"
    first, second = together(machines, "--rendezvous", f"{ADDRESSES[0]}:{PORT}", "--private-network", network)
    check_they_trained_together(first, second, ADDRESSES[0], sealed=False)


def test_after_a_failure_both_machines_restart_together(machines: list[Machine]) -> None:
    """They meet by the first one's name, which means a loopback address there, and encrypt nevertheless."""
    (machines[1].directory / "lethal").touch()
    first, second = together(machines, "--rendezvous", f"first:{PORT}", "--max-restarts", "1")
    check_they_trained_together(first, second, "first")
    assert "Restarting all workers (1 of at most 1)" in first
    assert "rank 1 failed: it ended with signal SIGKILL" in second


ELASTIC = """
import torch
import gossamer
from gossamer.train import checkpoint
world = gossamer.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = gossamer.attach(model, optimizer)
together = 0
while together < 3:
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    together += world.size == 2
print("digest", checkpoint.digest(model.parameters()), "g")
"""


@pytest.mark.nightly
def test_an_elastic_run_on_two_machines_encrypts_by_default_and_within_limits(
    machines: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both machines limit their uploads, too, so that all connections of a sealed run are metered."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for each in machines:
        (each.directory / "train.py").write_text(ELASTIC)
    limits = ("--upload-limit", "50mbit", "--daily-cap", "10GB")
    token = machines[0].directory / "token"
    token.write_bytes(os.urandom(32))
    token.chmod(0o600)
    listen = f"{ADDRESSES[0]}:{PORT}"
    running = [machines[0].start("--workers", "1:2:1", "--listen", listen, "--token-file", str(token), *limits)]
    while not list(machines[0].directory.glob(f"runs/*/{RUN_CARD}")):  # written when the coordinator listens
        assert running[0].poll() is None, running[0].communicate()
        time.sleep(0.05)
    running.append(machines[1].start("--join", listen, "--token-file", str(token), *limits))
    outputs = ["\n".join(each.communicate(timeout=200)) for each in running]
    assert [each.returncode for each in running] == [0, 0], outputs
    assert digest(outputs[0]) == digest(outputs[1])
    assert "connections between workers are encrypted" in outputs[0]
    assert json.loads((tmp_path / "state" / "gossamer" / "traffic.json").read_text())["bytes"] > 3 * 4 * 64 * 64


LIMIT_BITS = 8e6
MEASURED = """
import time
import torch
import gossamer

def sent():
    lines = [line.split() for line in open("/proc/net/dev") if ":" in line]
    return sum(int(line[9]) for line in lines if line[0] != "lo:")

world = gossamer.init()
model = torch.nn.Linear(500, 500)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
session = gossamer.attach(model, optimizer, "Dense()")
marks = []
for step in range(7):
    model(torch.randn(4, 500)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    marks.append((time.monotonic(), sent()))
session.close()
print("sent", marks[-1][1] - marks[1][1], marks[-1][0] - marks[1][0])
"""


@pytest.mark.measures
@pytest.mark.parametrize("option", ["--upload-limit", *nightly("--download-limit")])
def test_the_counters_of_the_interface_stay_within_the_limit(machines: list[Machine], option: str) -> None:
    """Machine 0 sends within its upload limit, or within the download limit of machine 1."""
    for each in machines:
        (each.directory / "train.py").write_text(MEASURED)
    limited = 0 if option == "--upload-limit" else 1
    shared = ("--nnodes", "2", "--rendezvous", f"{ADDRESSES[0]}:{PORT}")
    running = [
        each.start("--node-rank", str(place), *shared, *((option, "8mbit") if place == limited else ()))
        for place, each in enumerate(machines)
    ]
    outputs = ["\n".join(each.communicate(timeout=200)) for each in running]
    assert [each.returncode for each in running] == [0, 0], outputs
    (line,) = (line for line in outputs[0].splitlines() if "sent" in line and "rank 0" in line)
    nbytes, seconds = (float(word) for word in line.split()[-2:])
    assert nbytes >= 5 * 4 * 500 * 500, "fewer bytes than the gradients of five steps"
    assert 0.8 * LIMIT_BITS <= 8 * nbytes / seconds <= 1.05 * LIMIT_BITS


def test_without_a_first_machine_the_second_reports_where_it_looked(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "2")  # usually it waits for half an hour
    with machines[1].start("--nnodes", "2", "--node-rank", "1", "--rendezvous", f"first:{PORT}") as second:
        _, said = second.communicate(timeout=200)
    assert second.returncode == 1
    assert f"No connection to machine 0 at first:{PORT}, interface g" in said
    assert "no launcher listens there" in said
    assert "Traceback" not in said
