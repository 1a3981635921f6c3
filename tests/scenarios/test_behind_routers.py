"""Two homes behind routers and an office with one open port train together, by the real commands."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import permutations
from pathlib import Path

import pytest
from support.homes import CARRIER, OFFICE, PORT, PORT_ONLY, SYMMETRIC, Internet, internet, missing
from support.nightly import nightly
from support.paths import EXAMPLES

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.processes,
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]

TRAIN = """
import torch
import gossamer
torch.set_num_threads(1)
world = gossamer.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
session = gossamer.attach(model, optimizer)
together = 0
while together < 2:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    together += world.size == 3
print("ended", session.steps, sum(p.double().sum().item() for p in model.parameters()).hex())
"""


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Iterator[Internet]:
    with internet(*request.param) as built:
        yield built


@pytest.fixture
def start(net: Internet, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `gossamer` on a machine, which has a folder of its own. Processes do not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def start_one(machine: str, *words: str) -> subprocess.Popen[str]:
        folder = tmp_path / machine
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(TRAIN)
        command = [*net.prefix(machine), sys.executable, "-m", "gossamer", *words]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(command, cwd=folder, text=True, **output))  # type: ignore[call-overload]
        return started[-1]

    yield start_one
    for each in started:
        if each.poll() is None:
            each.kill()
        each.communicate()


@pytest.mark.parametrize(
    ("net", "relay"),
    [((SYMMETRIC, SYMMETRIC), ("--relay",)), *nightly(((PORT_ONLY, CARRIER), ()))],
    indirect=["net"],
    ids=["by the relay", "directly"],
)
def test_two_homes_behind_routers_and_an_office_with_one_open_port_train_to_equal_parameters(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, relay: tuple[str, ...]
) -> None:
    link = tmp_path / "link"
    options = ("--listen", f"{OFFICE}:{PORT}", *relay, "--invite", str(link))
    processes = [start("office", "run", "--workers", "1:3:1", *options, "train.py")]
    while not link.exists():
        assert processes[0].poll() is None, processes[0].communicate()[0]
        time.sleep(0.05)
    processes += [start(home, "join", f"@{link}", "train.py") for home in ("home1", "home2")]
    outputs = [each.communicate(timeout=250)[0] for each in processes]
    assert [each.returncode for each in processes] == [0, 0, 0], outputs
    ends = [re.findall(r"ended (.*)", output) for output in outputs]
    assert [len(each) for each in ends] == [1, 1, 1], outputs
    assert len({each[0] for each in ends}) == 1, outputs
    assert ("their traffic passes this machine" in outputs[0]) is bool(relay)


def test_a_network_file_with_relays_is_emulated_with_the_relay_of_the_run(tmp_path: Path) -> None:
    """The hosts of both homes exchange no packets, and the store names their relay."""
    (tmp_path / "train.py").write_text(TRAIN)
    options = [
        "--workers",
        "3:3",
        "--relay",
        "--network",
        str(EXAMPLES / "networks" / "two-homes.toml"),
        "--logs",
        "logs",
    ]
    command = [sys.executable, "-m", "gossamer", "run", *options, "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert "their traffic passes this machine" in output
    ends = re.findall(r"ended (.*)", output)
    assert len(ends) == 3, output
    assert len(set(ends)) == 1, output
    with closing(sqlite3.connect(tmp_path / "logs" / "run.sqlite")) as db:
        relays = {
            (source, target): relay for source, target, relay in db.execute("SELECT source, target, through FROM link")
        }
    assert relays == {(a, b): "rank 0" if 0 not in (a, b) else None for a, b in permutations(range(3), 2)}
