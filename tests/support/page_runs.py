"""Page runs: executes the commands that pages print, in order and in one folder per page, on small scripts.

Programs are shortened: train.py is TRAIN, runs end after GOSSAMER_SECONDS, and SHORTER replaces options
that take minutes. Python blocks that begin with a comment such as `# train.py` are saved as that file.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.page_commands import FENCE, command_lines, token_file
from support.paths import ROOT

TRAIN = """
import argparse
import torch
import gossamer

options = argparse.ArgumentParser()
options.add_argument("--seed", type=int, default=0)
options.add_argument("--learning-rate", type=float, default=0.05)
options.add_argument("--epochs", type=int, default=1)
options = options.parse_args()
torch.manual_seed(options.seed)
world = gossamer.init()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(world.device)
optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
inputs = torch.randn(4096, 16)
dataset = torch.utils.data.TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))
data = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=world.shard(dataset))
with gossamer.attach(model, optimizer) as session, session.epoch():
    for step, (x, y) in zip(range(130), data):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
        if step % 10 == 0:
            session.log(validation_loss=loss.item())
"""
SECONDS = 4  # of training in each run
LIMIT_SECONDS = 900.0  # of a command
SHORTER = {
    r"--minutes \d+": "--minutes 0.2",
    r"gossamer advise (?!.*--minutes)": "gossamer advise --minutes 0.2 ",
    r"--seconds \d+": "--seconds 3",
    r"--seeds 3": "--seeds 1",
    r"--rates [\d.,]+": "--rates 0.05",
    r"--clients \d+": "--clients 20",
    r"--rounds \d+": "--rounds 2",
    r"\b(first|192\.0\.2\.1|10\.0\.0\.1):": "localhost:",
    r"--listen localhost": "--listen 127.0.0.1",
    r"prometheus:9400,otlp:\S+": "prometheus:19400",
}
# Commands that are not executed, each with the reason
NOT_RUN = {
    r"pip install": "changes the environment; .ci/run installs the package, test_plain_install its wheel",
    r"srun ": "needs Slurm; test_clusters sets its variables",
    r"mpirun ": "needs Open MPI; test_launchers runs it where it is installed",
    r"make ": "CI runs it, or it needs hours or a GPU",
    r"python (benchmarks|tests)/": "a measurement of minutes to days; tests of benchmarks run small sizes",
    r"gossamer bench |gossamer rehearse --shapes resnet50": "a measurement of minutes",
    r"gossamer watch|gossamer run --watch": "serves a page until it is stopped; tests/observe/watch runs it",
    r"gossamer federate (serve|join)": "serves until all rounds are made; test_federate_server runs it",
    r"gossamer federate enroll": "asks for a server's identity; test_federate_server runs it",
    r"gossamer run --join|gossamer resize": "needs an elastic run of another launcher; test_elastic_runs runs it",
    r"--nnodes 4 |--links ": "needs four machines; test_two_machines runs two launchers",
    r"--job.config_file|config/train_gpt2.py|--workers 2:8 --max-restarts 20 train.py$": "a script of another project",
    r"examples/(gpt2|lightning_digits|jax_\w+|ray_train)\.py|hf_overhead": "needs a framework; test_examples runs it",
    r"gossamer simulate --parameters": "10,000 workers take minutes; test_simulate runs fewer",
    r"--size base": "trains the base model for minutes; test_examples trains a small one",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def printed(page: str, *, spans: bool = False) -> list[str]:
    """The commands of a page in order, once each. spans: also those in its tables and sentences that name a script."""
    lines = [line for line in command_lines(page) if not line.fragment or (spans and ".py" in line.text)]
    texts = [shlex.join(shlex.split(line.text, comments=True)) for line in lines if "..." not in line.text]
    return list(dict.fromkeys(texts))


def reason(command: str) -> str | None:
    """Why a command is not executed; None if it is."""
    plain = " ".join(shlex.split(command))
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, plain)), None)


def of_page(path: Path) -> list[str]:
    return printed(path.read_text(encoding="utf-8"), spans=path.name == "README.md" and path.parent == ROOT)


def executed(path: Path) -> list[str]:
    return [command for command in of_page(path) if reason(command) is None]


def files(page: str) -> Iterator[tuple[str, str]]:
    """Name and content of each Python block that begins with its file name."""
    for language, block in FENCE.findall(page):
        if language == "python" and (named := re.match(r"# (\w+\.py)\b", block)):
            yield named[1], block


def prepare(folder: Path, page: str) -> None:
    """The reader's folder: a checkout with a script of their own, and the scripts of the page."""
    for name in ("examples", "benchmarks", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "train.py").write_text(TRAIN)
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(TRAIN)
    for name, content in files(page):
        (folder / name).write_text(content)


def run_all(commands: Sequence[str], folder: Path) -> None:
    """Execute the commands in order. Commands of several machines run at the same time."""
    at = 0
    while at < len(commands):
        count = 1
        while (
            "--node-rank" in commands[at]
            and at + count < len(commands)
            and f"--node-rank {count}" in commands[at + count]
        ):
            count += 1
        _run_together(commands[at : at + count], folder)
        at += count


def _run_together(commands: Sequence[str], folder: Path) -> None:
    started = [(command, _start(command, folder, number)) for number, command in enumerate(commands)]
    for command, process in started:
        try:
            said, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            for _, each in started:
                each.kill()
            raise
        assert process.returncode == 0, f"{command}\nended with exit code {process.returncode}:\n{said[-4000:]}"


def _start(command: str, folder: Path, number: int) -> subprocess.Popen[str]:
    text = " ".join(shlex.quote(word) for word in shlex.split(command))
    for pattern, shorter in SHORTER.items():
        text = re.sub(pattern, shorter, text)
    newest = max((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime, default=folder)
    there = {"FILE": token_file(), "RUN": str(newest), "runs/TIME": str(newest)}
    words = [there.get(word, word) for word in shlex.split(text)]
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src")])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "GOSSAMER_SECONDS": str(SECONDS)}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if len(words) > 1 and words[0] == "gossamer" and words[1] == "run" and "--node-rank" in words:
        words[2:2] = ["--logs", f"runs/machine-{number}"]
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
