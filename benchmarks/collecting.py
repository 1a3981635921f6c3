"""What a run's store costs: microseconds of each step's training thread, and the file's size at its bounds.

A step is what a session tells of one: how long it took, and a logged loss. It is told to nobody, to the record alone,
and to the record and all that is told aside, with the hooks that time the loop's data, in blocks that take turns. Time
is the thread's own on a core, so that other work of the machine does not count.

    python benchmarks/collecting.py [--size]
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from gossamer import events
from gossamer.events import Attached, Logged, StepEnded
from gossamer.observe.aside_log import Aside
from gossamer.observe.event_log import Recorder
from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.telemetry.store import THINNED, thin
from gossamer.train.session.session_status import DataWait

BLOCK_STEPS, BLOCKS = 2000, 15
RANKS, STEPS, STEPS_A_SECOND = 256, 100_000, 100
CHUNK_SECONDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="store_true", help="measure the size of a large run's store instead")
    if parser.parse_args().size:
        size()
    else:
        seconds()


# -- seconds -----------------------------------------------------------------------------------------------------------


@contextmanager
def nobody(directory: Path) -> Iterator[None]:
    yield


@contextmanager
def record(directory: Path) -> Iterator[None]:
    recorder = Recorder(directory, 0)
    end = events.subscribe(recorder)
    about = {"layouts": (), "parameters": 1, "buffer_bytes": 0, "control_bytes": 0}
    events.emit(Attached(recipe="Dense()", rank=0, world=1, **about))  # type: ignore[arg-type]
    yield
    end()
    recorder.close()


@contextmanager
def everything(directory: Path) -> Iterator[None]:
    aside = Aside(directory, 0)
    with record(directory):
        yield
    aside.close()


def seconds() -> None:
    ways = {"nobody": nobody, "record": record, "everything": everything}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(BLOCKS):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder, way(Path(folder)):
                found[name].append(block(hooks=name == "everything"))
    least = statistics.median(found["nobody"])
    for name, each in found.items():
        print(f"told to {name:<11} {1e6 * (statistics.median(each) - least):6.2f} us a step more than to nobody")


def block(*, hooks: bool) -> float:
    """Seconds a step."""
    model = nn.Identity()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    wait = DataWait()
    handles = wait.watch(model, optimizer) if hooks else ()
    batch = torch.zeros(1)
    take: Callable[[], float] = wait.take if hooks else float
    began = time.thread_time()
    for step in range(BLOCK_STEPS):
        model(batch)
        optimizer.step()
        events.emit(StepEnded(step=step, seconds=0.01, waiting_seconds=0.001, data_seconds=take(), bytes_sent=100.0))
        events.emit(Logged(step=step, values={"loss": 1.0}))
    found = (time.thread_time() - began) / BLOCK_STEPS
    for handle in handles:
        handle.remove()
    return found


# -- size --------------------------------------------------------------------------------------------------------------


def size() -> None:
    """A row a second of each rank's steps, a logged loss for every step of rank 0 and a second of the others', five
    vitals of each rank every two seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        db = open_store(path)
        fill(db)
        counts = {each.name: db.execute(f"SELECT COUNT(*) FROM {each.name}").fetchone()[0] for each in THINNED}
        db.close()
        print(f"{RANKS} ranks x {STEPS} steps: {path.stat().st_size / 1e6:.0f} MB, rows {counts}")


def fill(db: sqlite3.Connection) -> None:
    """Insert all of a large run, thinned as it comes."""
    for begin in range(0, STEPS // STEPS_A_SECOND, CHUNK_SECONDS):
        with db:
            for table, rows in chunk(range(begin, begin + CHUNK_SECONDS)).items():
                insert(db, table, rows)
            for each in THINNED:
                thin(db, each, each.most)


Row = dict[str, object]
PARTS = ("compute", "encode", "wire", "decode", "waiting", "data")


def chunk(moments: range) -> dict[str, Iterator[Row]]:
    return {"step": _steps(moments), "metric": _metrics(moments), "vital": _vitals(moments)}


def _steps(moments: range) -> Iterator[Row]:
    for at in moments:
        for rank in range(RANKS):
            parts = {name: 0.1 / (1 + place + rank) + 1e-7 * at for place, name in enumerate(PARTS)}
            told = {"rank": rank, "step": (at + 1) * STEPS_A_SECOND, "at": 1.8e9 + at + 1e-5 * rank, "seconds": 1.0}
            sums = {"steps": STEPS_A_SECOND, "bytes_sent": 1e6 + rank, "bytes_pulled": 0.0, "skipped": 0}
            yield {**told, **parts, **sums}


def _metrics(moments: range) -> Iterator[Row]:
    for at in moments:
        for rank in range(RANKS):
            for place in range(1 if rank else STEPS_A_SECOND):
                step = (at + 1) * STEPS_A_SECOND - place
                yield {"name": "loss", "step": step, "at": 1.8e9 + step / 10, "rank": rank, "value": 1 / (step + 3)}


def _vitals(moments: range) -> Iterator[Row]:
    for at in moments[::2]:
        for rank in range(RANKS):
            for name in ("cpu_share", "cpu_wait", "gc_seconds", "rss", "throttled"):
                machine = f"machine-{rank // 8}"
                yield {"machine": machine, "rank": rank, "at": 1.8e9 + at, "name": name, "value": 1 / (at + 3)}


if __name__ == "__main__":
    main()
