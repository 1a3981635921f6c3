"""Start-up: seconds from `gossamer run` to the first line of the script in all workers, over one import of torch.

Three programs take turns: `import torch` in one process, `gossamer run` with forked workers, and with workers that are
new programs (GOSSAMER_FORK=0). --before adds a fourth, `gossamer run` from another folder of sources. The script prints
the time after `import gossamer`, and the CPU seconds that the launcher and all its children have used until then.
Each ratio is of neighbors in time. On a busy machine, CPU seconds are the better guide: forks come one after another,
while new programs use several cores. Linux only.

    python benchmarks/startup.py [--workers 4] [--rounds 9] [--before FOLDER]
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

SCRIPT = """
import gossamer
import os, time
moment, launcher, used = time.time(), os.getppid(), 0
with open(f"/proc/{launcher}/task/{launcher}/children") as file:
    family = [launcher, *file.read().split()]
for pid in family:
    try:
        with open(f"/proc/{pid}/stat") as file:
            used += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    except OSError:  # it has ended, as its output says
        pass
print("first line", moment, used / os.sysconf("SC_CLK_TCK"))
"""
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}  # as installed packages are; the first round compiles sources
TORCH = "import torch, time\nprint('first line', time.time(), time.process_time())\n"


def start(command: Sequence[str], lines: int, folder: Path, added: Mapping[str, str]) -> tuple[float, float]:
    """Seconds from the start of a command to the last of its `lines` first lines, and CPU seconds until then.

    Raises RuntimeError unless the command prints as many.
    """
    began = time.time()
    environment = {**os.environ, **COMPILED, **added}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    found = re.findall(r"first line ([\d.]+) ([\d.]+)", done.stdout)
    if done.returncode or len(found) != lines:
        raise RuntimeError(f"{shlex.join(command)} printed {len(found)} of {lines} lines:\n{done.stdout}{done.stderr}")
    return max(float(moment) for moment, _ in found) - began, max(float(cpu) for _, cpu in found)


def measure(workers: int, rounds: int, before: Path | None) -> dict[str, list[tuple[float, float]]]:
    """(seconds, CPU seconds) of each program, one per round."""
    run = [sys.executable, "-m", "gossamer", "run", "--workers", str(workers), "train.py"]
    programs: dict[str, tuple[list[str], int, dict[str, str]]] = {
        "import torch": ([sys.executable, "-c", TORCH], 1, {}),
        "forks": (run, workers, {}),
        "new programs": (run, workers, {"GOSSAMER_FORK": "0"}),
    }
    if before is not None:
        programs["before"] = (run, workers, {"PYTHONPATH": str(before)})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for number in range(-1, rounds):  # the first round compiles sources and fills the page cache
            for program, (command, lines, added) in programs.items():
                figures = start(command, lines, folder, added)
                if number >= 0:
                    found[program].append(figures)
                    print(f"round {number} {program}: {figures[0]:.2f} s, {figures[1]:.2f} s CPU", file=sys.stderr)
    return found


def table(found: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    """Medians with the spread of the middle half; ratios to the `import torch` of the same round."""
    torch = found["import torch"]
    rows = [f"{'':14}{'seconds':>22}{'over import torch':>22}{'CPU seconds':>22}{'over import torch':>22}"]
    for name, figures in found.items():
        columns = []
        for kind in range(2):
            values = [figure[kind] for figure in figures]
            columns += [values, [value / base[kind] for value, base in zip(values, torch, strict=True)]]
        rows.append(f"{name:14}" + "".join(f"{with_spread(column):>22}" for column in columns))
    return rows


def with_spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Seconds of `gossamer run` until the script's first line.")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--before", type=Path, metavar="FOLDER", help="sources of another version, such as OLD/src")
    args = options.parse_args()
    found = measure(args.workers, args.rounds, None if args.before is None else args.before.resolve())
    print(provenance())
    print("\n".join(table(found)))
