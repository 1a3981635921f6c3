"""`gossamer explain` on scripts, and what it printed."""

import json
from pathlib import Path

from support.command_line import output_of

from gossamer.cli import explain as explain_module
from gossamer.cli.explain import explain
from gossamer.plan.profile.profile_runs import ProfileError

MILLION = ("--parameters", "1000000")

SCRIPT = """
import os, sys
from gossamer import events
from gossamer.base.layout import Layout
size = int(sys.argv[sys.argv.index("--workers") + 1])
events.emit(events.Attached(
    recipe=os.environ["GOSSAMER_RECIPE"], layouts=(("float32", Layout.of({"w": (size, size)})),),
    parameters=size * size, buffer_bytes=400, control_bytes=22, rank=0, world=1))
"""

TRAINING = """
import time, torch, gossamer
model = torch.nn.Linear(500, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
for step in range(6):
    model(torch.randn(8, 500)).mean().backward()
    time.sleep(0.02)
    optimizer.step()
"""


def untimed_script(folder, monkeypatch):
    """One that attaches, and makes no step that could be timed."""

    def not_timed(*_):
        raise ProfileError("it made no step")

    path = Path(folder) / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(explain_module, "profile_script", not_timed)
    return str(path)


def run(*args):
    return output_of(explain, *args)


def shown(output, start):
    """The number on the first line that starts with `start`."""
    line = next(line for line in output.splitlines() if line.strip().startswith(start))
    return int(line.strip().removeprefix(start).split()[0].replace(",", ""))


def explained(tmp_path, *args, script=()):
    file = tmp_path / "out.json"
    code, output = run(*args, "--json", str(file), *script)
    assert code == 0, output
    return output, json.loads(file.read_text())
