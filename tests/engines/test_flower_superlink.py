"""Flower: an app runs on a SuperLink and SuperNodes, compressed; a node is killed between rounds, another one joins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes import free_port

pytest.importorskip("flwr", minversion="1.42")  # its SuperLink has one port
PROGRAMS = Path(sys.executable).parent
if not shutil.which("flower-superlink", path=PROGRAMS):
    pytest.skip("Flower's programs are not installed", allow_module_level=True)

SECONDS = 500
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "job"
version = "1.0.0"
description = "Three rounds"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "job.server:app"
clientapp = "job.client:app"

[tool.flwr.app.config]
rounds = 3
result = ""
"""
CLIENT = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gossamer.federated.flower import compression_mod

app = ClientApp(mods=[compression_mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    state = message.content["arrays"].to_torch_state_dict()
    state = {name: value - 0.1 * torch.sign(value) for name, value in state.items()}
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 10})})
    return Message(content, reply_to=message)
"""
SERVER = """
import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from gossamer.federated.flower import CompressedStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=2)
    strategy = CompressedStrategy(inner, "TopK(0.25)")
    first = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    found = strategy.start(grid, ArrayRecord({"weight": first}), num_rounds=int(context.run_config["rounds"]))
    last = found.arrays.to_torch_state_dict()["weight"]
    result = {
        "up": [[each.up_bytes, each.up_plain_bytes] for each in strategy.traffic],
        "nodes": [len(each.by_node) for each in strategy.traffic],
        "before": float(first.abs().mean()),
        "after": float(last.abs().mean()),
    }
    Path(str(context.run_config["result"])).write_text(json.dumps(result))
"""


class Federation:
    """A SuperLink and its SuperNodes, each in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._groups: list[subprocess.Popen[bytes]] = []
        self._environ = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )
        link = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
        self.start("link", *link, "--host", "127.0.0.1", "--port", str(self._port))
        self.wait(self._listens)

    def node(self, name: str) -> subprocess.Popen[bytes]:
        words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self._port}"]
        return self.start(name, *words, "--port", str(free_port()))

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self._environ, cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )
        self._groups.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self._groups:
            self.kill(process)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def wait(self, is_true: Callable[[], bool]) -> None:
        for _ in range(5 * SECONDS):
            if is_true():
                return
            threading.Event().wait(0.2)
        raise AssertionError("\n".join(path.read_text(errors="replace") for path in self._folder.glob("*.log")))

    def _listens(self) -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self._port), 1.0).close()
            return True
        return False


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    (tmp_path / "job").mkdir()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (tmp_path / "job" / f"{name}.py").write_text(text)
    made = Federation(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.processes
@pytest.mark.new_programs
@pytest.mark.timeout(3 * SECONDS)
def test_a_compressed_app_survives_the_loss_of_a_supernode(federation: Federation, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    federation.node("first")
    lost = federation.node("lost")
    federation.start("run", "flwr", "run", str(tmp_path), "here", "--stream", "-c", f"result='{result}'")
    federation.wait(lambda: "[ROUND 2/3]" in federation.log("run"))
    federation.kill(lost)
    federation.node("replacement")
    federation.wait(result.exists)
    federation.wait(lambda: bool(result.read_text()))
    found = json.loads(result.read_text())
    assert len(found["nodes"]) == 3
    assert found["nodes"][0] == 2
    assert found["after"] < found["before"]
    assert all(0 < up < 0.6 * plain for up, plain in found["up"])
