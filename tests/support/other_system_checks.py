"""What a process does in which Gossamer sees another system (tests/other_systems): each check is a function.

python -m support.other_system_checks FOLDER [CHECK...] runs all of them, or those named, and prints a line for each.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import warnings
from pathlib import Path

import torch

import gossamer
from gossamer.base import system
from gossamer.errors import GossamerError

STEPS = """
import sys
import torch
import gossamer

world = gossamer.init()
torch.manual_seed(world.rank)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
session = gossamer.attach(model, optimizer, "TopK(0.5)")
if len(sys.argv) > 1:
    session.load(sys.argv[1])
    if session.steps:
        sys.exit(f"began at step {session.steps}")
while session.steps < 4:
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    session.log(loss=loss.item())
if len(sys.argv) > 1:
    session.save(sys.argv[1])
session.close()
"""


def imports_every_module(folder: Path) -> str:
    count = 0
    for module in pkgutil.walk_packages(gossamer.__path__, "gossamer."):
        if module.name.rpartition(".")[2] in ("__main__", "libgossamer-kernels"):
            continue
        try:
            importlib.import_module(module.name)
            count += 1
        except (GossamerError, ImportError) as error:  # an optional package
            absent = getattr(error, "name", None) or ""
            if absent in sys.stdlib_module_names or absent.startswith("gossamer"):
                raise
    return f"{count} modules"


def trains_and_resumes_alone(folder: Path) -> str:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gossamer.attach(model, optimizer, "TopK(0.5)") as session:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.save(folder / "alone")
        session.load(folder / "alone")
        return f"step {session.steps}"


def commands_run(folder: Path) -> str:
    from click.testing import CliRunner

    from gossamer.cli.main import gossamer as command

    script = folder / "steps.py"
    script.write_text(STEPS, encoding="utf-8")
    simulated = ["simulate", "--workers", "2", "--network", "10mbit", "--recipe", "TopK(0.1)", "--step-seconds", "0.1"]
    for words in (["--help"], ["explain", "TopK(0.01)", "--parameters", "20000"], [*simulated, str(script)]):
        result = CliRunner().invoke(command, words)
        assert result.exit_code == 0, f"gossamer {' '.join(words)}: {result.output} {result.exception!r}"
    return "3 commands"


def refuses_namespaces(folder: Path) -> str:
    from gossamer.comm.network import read_network
    from gossamer.plan.emulation.capabilities import plan

    planned = plan(read_network("10mbit", 2))
    assert planned.emulation == "paced", planned
    assert "WSL2" in planned.reason, planned
    return planned.reason


def locks_exclude_each_other(folder: Path) -> str:
    files = [system.open_file(folder / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    system.lock_file(files[0].fileno())
    try:
        system.lock_file(files[1].fileno())
    except BlockingIOError:
        pass
    else:
        raise AssertionError("two open files have the lock")
    system.unlock_file(files[0].fileno())
    system.lock_file(files[1].fileno())
    for file in files:
        file.close()
    return "one at a time"


def reports_resources(folder: Path) -> str:
    assert system.cores() >= 1
    assert system.memory_bytes() > 2**28
    assert system.peak_resident_bytes() > 100_000  # Linux counts kilobytes where macOS counts bytes
    assert system.load_average() >= 0
    assert system.open_file_limits()[0] > 10
    return f"{system.cores()} cores"


CHECKS = (
    imports_every_module,
    trains_and_resumes_alone,
    commands_run,
    refuses_namespaces,
    locks_exclude_each_other,
    reports_resources,
)


def main() -> None:
    warnings.filterwarnings("error", category=EncodingWarning, module="gossamer")
    for check in (check for check in CHECKS if check.__name__ in (sys.argv[2:] or check.__name__)):
        print(check.__name__, check(Path(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
