"""Page runs: executes the commands that pages print, in order and in one folder per page, on small scripts.

Programs are shortened: train.py is TRAIN, runs end after GOSSAMER_SECONDS, and SHORTER replaces options
that take minutes. Python blocks that begin with a comment such as `# train.py` are saved as that file.
`python -m support.page_runs` in tests/ lists each command with its test, or with the reason why none runs it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
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
    r"(gossamer study .*)--seeds \d+": r"\1--seeds 1",
    r"--seeds 3": "--seeds 1",
    r"--rates [\d.,]+": "--rates 0.05",
    r"(examples/demo.py) --seeds \d+": r"\1 --seeds 1 --seconds 3",
    r"(examples/gpt2.py)": r"\1 --steps 12 --evaluate-every 10",
    r"(examples/lightning_digits.py)": r"\1 --epochs 1",
    r"--size base": "--size tiny",
    r"rehearse --shapes resnet50 --step-seconds [\d.]+": "rehearse --steps 2 --shapes resnet18 --step-seconds 0.05",
    r"--parameters 100000000 (.*) --workers 10000": r"--parameters 1000000 \1 --workers 64",
    r"(federate serve .*) --clients \d+": r"\1 --clients 4",
    r"--clients \d{2,}": "--clients 20",
    r"--rounds \d+": "--rounds 2",
    r"--bind 0\.0\.0\.0": "--bind 127.0.0.1",
    r"\b(first|192\.0\.2\.1|10\.0\.0\.1|192\.168\.1\.5|203\.0\.113\.1|(office|home)\.example\.org):": "localhost:",
    r"--listen localhost": "--listen 127.0.0.1",
    r"prometheus:9400,otlp:\S+": "prometheus:19400",
}
# Commands that serve until they are stopped, each with a text of its output after which it is interrupted
SERVING = {r"gossamer watch(?! --terminal)": "http://"}
# Commands that the tests of their page do not execute, each with the reason or with the test that executes it
NOT_RUN = {
    r"\.\.\.": "an outline, with an ellipsis",
    r"pip install": "changes the environment; .ci/run installs the package and its extras",
    r"^make (?!bench|gpu)": "CI or a night runs this target",
    r"^make (bench|gpu)": "needs a GPU",
    r"benchmarks/\w+\.py": "a measurement of minutes to days; tests of benchmarks run their parts in small sizes",
    r"srun ": "needs Slurm; executed with its variables by tests/scenarios/test_clusters.py",
    r"gossamer run --join": "needs an elastic run; executed by tests/launcher/test_elastic_run_coordinator.py",
    r"gossamer resize": "needs an elastic run; executed by tests/cli/test_resize.py",
    r"gossamer limit ": "needs a run with limits; executed by tests/cli/test_limit.py",
    r"gossamer invite ": "needs an elastic run in progress; executed by tests/cli/test_join.py",
    r"gossamer doctor @": "needs a link; executed by tests/cli/test_doctor_link.py",
    r"gossamer join ": "needs a link; executed by tests/scenarios/test_behind_routers.py",
    r"gossamer stacks ": "needs a run that hangs; executed by tests/cli/test_stacks.py",
    r"gossamer federate enroll": "needs a server's identity; executed by tests/cli/test_federate_server.py",
    r"--job.config_file|config/train_gpt2.py": "a script of another project",
    r"examples/jax_\w+\.py": "needs JAX; executed by tests/integrations/jax/test_session_slices.py",
    r"examples/ray_train\.py": "needs Ray",
    r"explain RECIPE": "a part of a sentence; the page has the whole command",
}
if shutil.which("mpirun") is None:
    NOT_RUN["mpirun "] = "needs Open MPI"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def printed(page: str) -> list[str]:
    """The commands of a page in order, once each; those within sentences and tables count if they name a script."""
    lines = [line for line in command_lines(page) if not line.fragment or ".py" in line.text]
    return list(dict.fromkeys(shlex.join(shlex.split(line.text, comments=True)) for line in lines))


def reason(command: str) -> str | None:
    """The reason why no test of its page executes a command; None if one does."""
    plain = " ".join(shlex.split(command))
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, plain)), None)


def of_page(path: Path) -> list[str]:
    return printed(path.read_text(encoding="utf-8"))


def executed(path: Path) -> list[str]:
    return [command for command in of_page(path) if reason(command) is None]


def report() -> str:
    """A line for each command, with its test or the reason why none runs it, and the counts."""
    rows = [(path, command, reason(command)) for path in PAGES for command in of_page(path)]
    elsewhere = sum(why is not None and "executed by" in why for *_, why in rows)
    here = sum(why is None for *_, why in rows)
    lines = [f"{path.relative_to(ROOT)}: {command}: {why or 'executed'}" for path, command, why in rows]
    counts = f"{len(rows)} printed, {here} executed, {elsewhere} by another test, {len(rows) - here - elsewhere} not"
    return "\n".join([*lines, counts])


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
        group = [commands[at]]
        while at + len(group) < len(commands) and _belongs(commands[at + len(group)], group):
            group.append(commands[at + len(group)])
        at += len(group)
        _run_together([each for command in group for each in _machines(command, group)], folder)


def _belongs(command: str, group: Sequence[str]) -> bool:
    """Whether it runs while the group does: on another machine of the same job, or as a device of its server."""
    if "federate join" in command:
        return "federate serve" in group[0]
    return f"--node-rank {len(group)}" in command and "--node-rank 0" in group[0]


def _machines(command: str, group: Sequence[str]) -> list[str]:
    """The command on each machine: those that the page leaves out differ in --node-rank only, devices in --number."""
    if "federate join" in command:
        return [re.sub(r"--state state --number \d", f"--state state-{n} --number {n}", command) for n in range(4)]
    if len(group) == 1 and (machines := re.search(r"--nnodes (\d+) --node-rank 0", command)):
        ranks = range(int(machines[1]))
        return [command.replace("--node-rank 0", f"--node-rank {n}") for n in ranks]
    return [command]


def _run_together(commands: Sequence[str], folder: Path) -> None:
    started = []
    try:
        for number, command in enumerate(commands):
            started.append((command, _start(command, folder, number)))
        for command, process in started:
            if after := next((text for pattern, text in SERVING.items() if re.search(pattern, command)), None):
                _interrupt(process, after)
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0, f"{command}\nended with exit code {process.returncode}:\n{output[-4000:]}"
    finally:
        for _, process in started:
            process.kill()


def _interrupt(process: subprocess.Popen[str], after: str) -> None:
    """As a user does with Control-C, once this text is printed."""
    seen = ""
    for line in process.stdout or ():
        seen += line
        if after in line:
            process.send_signal(signal.SIGINT)
            return
    raise AssertionError(f"{after!r} was not printed:\n{seen}")


def _start(command: str, folder: Path, number: int) -> subprocess.Popen[str]:
    text = " ".join(shlex.quote(word) for word in shlex.split(command))
    for pattern, shorter in SHORTER.items():
        text = re.sub(pattern, shorter, text)
    words = shlex.split(text)
    if "RUN" in words and not list((folder / "runs").glob("*")):
        _run_together(["gossamer run --workers 2 train.py"], folder)  # the run that the page assumes
    newest = max((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime, default=folder)
    there = {"FILE": token_file(), "RUN": str(newest), "runs/TIME": str(newest)}
    words = [there.get(word, word) for word in words]
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src")])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "GOSSAMER_SECONDS": str(SECONDS)}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if len(words) > 1 and words[0] == "gossamer" and words[1] == "run" and "--node-rank" in words:
        words[2:2] = ["--logs", f"runs/machine-{number}"]
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


if __name__ == "__main__":
    print(report())
