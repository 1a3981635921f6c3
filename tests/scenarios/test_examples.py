"""The examples learn, resume to the same bits, and leave workers with the same model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import bytelm
from support.nightly import nightly
from support.paths import ROOT
from support.processes import free_port

# Runs a script as `python SCRIPT ...` would and prints what it logged and the digest of its parameters.
LISTEN = """
import json, runpy, sys
from gossamer import events
heard = {"loss": [], "digest": ""}
def listen(event):
    if isinstance(event, events.Logged):
        heard["loss"] += [value for name, value in event.values.items() if name == "loss"]
        heard.update({name: value for name, value in event.values.items() if name != "loss"})
    if isinstance(event, events.Closed):
        heard.update(digest=event.digest, steps=event.steps)
events.subscribe(listen)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("heard", json.dumps(heard))
"""


def start(script: str, *arguments: str, rank: int = 0, world: int = 1, port: int = 0) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    group = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    job = {name: str(value) for name, value in group.items()} if world > 1 else {}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", LISTEN, str(ROOT / "examples" / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **job},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(worker: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = worker.communicate(timeout=200)
    assert worker.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("heard ")]
    return dict(json.loads(line.removeprefix("heard ")))


def alone(script: str, *arguments: str) -> dict[str, Any]:
    return finish(start(script, *arguments))


def together(world: int, script: str, *arguments: str) -> list[dict[str, Any]]:
    port = free_port()
    workers = [start(script, *arguments, rank=rank, world=world, port=port) for rank in range(world)]
    try:
        return [finish(worker) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


# -- bytelm, without training


def test_windows_overlap_by_the_byte_to_guess(tmp_path: Path) -> None:
    text = bytes(range(200))
    (tmp_path / "a.py").write_bytes(text[:90])
    (tmp_path / "b.py").write_bytes(text[90:])
    rows = bytelm.windows([tmp_path / "a.py", tmp_path / "b.py"])
    assert rows.shape == (3, bytelm.CONTEXT + 1)
    assert bytes(rows[1].tolist()) == text[64:129]


@pytest.mark.parametrize(("size", "parameters"), [("small", 237_184), ("base", 3_307_264)])
def test_sizes(size: str, parameters: int) -> None:
    model = bytelm.ByteLM(*bytelm.SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_no_byte_sees_the_ones_after_it() -> None:
    torch.manual_seed(0)
    model = bytelm.ByteLM(16, 2, 2)
    text = torch.randint(256, (1, bytelm.CONTEXT + 1))
    guesses: list[torch.Tensor] = []
    model.guess.register_forward_hook(lambda module, args, output: guesses.append(output))
    model(text)
    text[0, 40] = (text[0, 40] + 1) % 256
    model(text)
    before, after = guesses
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


# -- training


@pytest.mark.processes
def test_bytelm_learns_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    common = ["--seed", "3", "--checkpoint", str(tmp_path / "resumed"), "--checkpoint-every", "15"]
    through = alone("bytelm.py", "--seed", "3", "--steps", "40")
    assert through["validation_loss"] < 4.5 < through["loss"][0]

    before = alone("bytelm.py", "--steps", "20", *common)  # goes 5 steps beyond its checkpoint
    after = alone("bytelm.py", "--steps", "40", *common)
    assert before["loss"] == through["loss"][:20]
    assert after["loss"] == through["loss"][15:]
    assert after["digest"] == through["digest"]


@pytest.mark.processes
@pytest.mark.parametrize("recipe", [*nightly("Dense()"), "TopK(density=0.05)"])
def test_bytelm_ends_alike_on_all_workers(recipe: str) -> None:
    first, second = together(2, "bytelm.py", "--steps", "12", "--batch", "2", "--recipe", recipe)
    assert first["digest"] == second["digest"]
    assert first["validation_loss"] == second["validation_loss"]
    assert first["loss"] != second["loss"], "both workers read the same text"
    assert first["steps"] == second["steps"] == 12


@pytest.mark.processes
@pytest.mark.parametrize("recipe", [*nightly("Dense()"), "LocalSGD(period=3)"])
def test_bytelm_ends_alike_when_time_runs_out(recipe: str) -> None:
    """Also between evaluations, to which all come."""
    limits = ["--steps", "100000", "--batch", "1", "--seconds", "2", "--evaluate-every", "2"]
    first, second = together(2, "bytelm.py", *limits, "--recipe", recipe)
    assert 0 < first["steps"] < 100_000
    assert first["digest"] == second["digest"]


@pytest.mark.processes
@pytest.mark.parametrize("model", ["conv", *nightly("resnet")])
def test_digits_are_learned_on_uneven_shares(model: str) -> None:
    # 719 and 718 images: the first worker has a third batch, of one image, in every epoch
    first, second = together(2, "digits.py", "--model", model, "--epochs", "6", "--batch", "359")
    assert (len(first["loss"]), len(second["loss"])) == (18, 12)
    assert first["digest"] == second["digest"]
    assert first["accuracy"] == second["accuracy"]
    assert second["loss"][-1] < 0.9 * second["loss"][0]
