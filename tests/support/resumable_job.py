"""A job that a cluster's engine starts: it saves each step, loses rank 1 once, and resumes when it is started again.

The script's arguments: a folder that all workers share, and how the job is interrupted: "lost" (rank 1 is killed after
three steps), "requested" (it trains until SIGTERM, saves and ends) or "never".
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SCRIPT = """
import os, signal, sys
from pathlib import Path

import torch

import gossamer
from gossamer.train.checkpoint import digest

folder, how = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
world = gossamer.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session = gossamer.attach(model, optimizer, "TopK(0.1)")
session.load(folder / "saved")
begin = session.steps
last = begin + 3 if begin else 10**9 if how == "requested" else 6
signal.signal(signal.SIGTERM, lambda number, frame: session.request_stop())
while session.steps < last and not session.should_stop:
    draws = torch.Generator().manual_seed(world.size * session.steps + world.rank)
    model(torch.randn(8, 20, generator=draws)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if how != "requested":
        session.save(folder / "saved")
    elif session.steps == 3:
        (folder / f"trains-{world.rank}").touch()
    if how == "lost" and not begin and session.steps == 3:
        gossamer.mean(0.0)  # all ranks have saved
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
session.save(folder / "saved")
end = session.steps
session.close()
(folder / f"rank-{world.rank}").write_text(f"{begin} {end} {digest(model.parameters())}")
"""


class Ending(NamedTuple):
    """First and last step of the latest start, and the digest of the parameters."""

    begin: int
    end: int
    digest: str


def write_job(folder: Path) -> Path:
    """Write the script; returns its path."""
    path = folder / "job.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def ending(folder: Path) -> Ending:
    """The common ending of both ranks."""
    first, second = ((folder / f"rank-{rank}").read_text().split() for rank in (0, 1))
    assert first == second
    return Ending(int(first[0]), int(first[1]), first[2])
