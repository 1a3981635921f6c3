"""A hang of real workers: the launcher names who is waited for, at which operation of which step, within seconds."""

from __future__ import annotations

import json
import re
from contextlib import chdir, closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.nightly import nightly
from support.processes import engine_files_left_open

from gossamer.cli.main import gossamer
from gossamer.observe.telemetry import open_store

STEPS, STUCK_AT = 12, 8
WAITED = f"of step {STUCK_AT + 1},"  # on a busy machine an earlier step may be told, too, and truly
TRAIN = f"""
import os, time
import torch, gossamer

torch.manual_seed(0)
rank, folder = gossamer.init().rank, os.environ["GOSSAMER_RUN_DIRECTORY"]
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer, "EveryStep()")

def told():
    with open(f"{{folder}}/launcher.jsonl") as file:
        text = file.read()
    return '"stacks"' in text.partition("{WAITED}")[2]

def load_a_batch(step):
    while rank == 1 and step == {STUCK_AT} and not told():
        time.sleep(0.01)  # the line where it is stuck, until it has been named
    return torch.randn(8, 4) + rank

for step in range({STEPS}):
    batch = load_a_batch(step)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


def run(folder: Path, *options: str) -> Result:
    (folder / "train.py").write_text(TRAIN)
    with chdir(folder), engine_files_left_open():
        return CliRunner().invoke(gossamer, ["run", "--logs", "logs", *options, "train.py"])


@pytest.mark.processes
@pytest.mark.parametrize("collective", ["auto", *nightly("engine")])
def test_a_rank_that_is_stuck_outside_an_operation_is_named(
    collective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the mesh, which knows whom it waits for, and by the engine, where the numbers of operations tell."""
    monkeypatch.setenv("GOSSAMER_HANG_SECONDS", "2")
    done = run(tmp_path, "--collective", collective)
    assert done.exit_code == 0, done.output
    said = re.search(rf"rank 0 has waited (\d+) s for rank 1 in the ([\w +-]+) {WAITED} bucket 1 of 1", done.output)
    assert said, done.output
    assert int(said[1]) >= 2
    assert "all-reduce" in said[2]
    assert "rank 1 is in no operation" in done.output
    dumped = CliRunner().invoke(
        gossamer, ["stacks", str(tmp_path / "logs"), "--flight-recorder", str(tmp_path / "dump")]
    )
    assert dumped.exit_code == 0, dumped.output
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["gossamer_rank_0", "gossamer_rank_1"]
    with closing(open_store(tmp_path / "logs" / "run.sqlite", readonly=True)) as db:
        findings = {tuple(row) for row in db.execute("SELECT rank, step FROM finding WHERE cause = 'hang'")}
        assert (1, STUCK_AT + 1) in findings
        *_, event = db.execute("SELECT content FROM event WHERE kind = 'stacks' ORDER BY id").fetchall()
        lines = json.loads(event["content"])["lines"]
        assert any("rank 1: at train.py" in line and "load_a_batch" in line for line in lines), lines
        assert any(line.startswith("rank 0: ") and "waits for rank 1" in line for line in lines) == (
            collective == "auto"
        ), lines
        assert [row["state"] for row in db.execute("SELECT state FROM rank")] == ["finished"] * 2
