"""Rendezvous: seconds from the arrival of the last worker at gossamer.init() until all workers have joined.

`gossamer run` starts the workers on this machine, as forks of one process. They wait for a file, so that the last one
arrives when the others wait already. Its rank is 0, which hosts the meeting, or the highest. Also the CPU seconds of
all workers within the call: with as many workers as cores, each has its own.

TORCH_GLOO_LAZY_INIT=1, which torch reads, leaves out Gloo's connections between all pairs.

    python benchmarks/rendezvous.py [--workers 8 64] [--rounds 5]
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

SCRIPT = """
import json, os, sys, time
import gossamer
rank, last = int(os.environ["RANK"]), int(sys.argv[1]) % int(os.environ["WORLD_SIZE"])
folder = sys.argv[2]
if rank == last:
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.05)
    time.sleep(1)  # by then the others wait
else:
    open(os.path.join(folder, str(rank)), "w").close()
arrived, cpu = time.time(), time.process_time()
world = gossamer.init()
print("joined", json.dumps([arrived, time.time(), time.process_time() - cpu]))
world.barrier()
"""


def measure(workers: int, last: int) -> tuple[float, float]:
    """Seconds after the last arrival, and CPU seconds of all workers. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory() as name:
        script, folder = Path(name) / "join.py", Path(name) / "arrived"
        script.write_text(SCRIPT)
        folder.mkdir()
        command = ["-m", "gossamer", "run", "--workers", str(workers), str(script), str(last), str(folder)]
        done = subprocess.run([sys.executable, *command], cwd=name, capture_output=True, text=True)
    found = [json.loads(text) for text in re.findall(r"joined (\[.*\])", done.stdout)]
    if done.returncode or len(found) != workers:
        raise RuntimeError(f"{len(found)} of {workers} workers joined:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    arrivals, ends, used = zip(*found, strict=True)
    return max(ends) - max(arrivals), sum(used)


def row(workers: int, last: int, found: list[tuple[float, float]]) -> str:
    cells = [f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in zip(*found, strict=True)]
    return f"{workers:>7} {'rank 0' if last == 0 else 'highest':>8} {cells[0]:>20} {cells[1]:>20}"


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Seconds of gossamer.init() after the last worker's arrival.")
    options.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    print(provenance())
    print(f"{'workers':>7} {'last':>8} {'seconds, median':>20} {'CPU s of all':>20}")
    for workers in args.workers:
        for last in (0, -1):
            print(row(workers, last, [measure(workers, last) for _ in range(args.rounds)]), flush=True)
