"""The demo: its figures, its picture, and that plain DDP is what it is compared with."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import demo, demo_report
from examples.demo_report import METRIC, Runs
from support.paths import ROOT
from support.processes import free_port

from gossamer.algorithms.recipes.recipe import resolve

ARGS = argparse.Namespace(network="100mbit,20ms", seconds=25.0, size="small", learning_rate=0.008)


def record(*losses: tuple[float, float], steps: int = 100) -> dict[str, Any]:
    return {"steps": steps, "metrics": {METRIC: [[place, *point] for place, point in enumerate(losses)]}}


def runs(name: str, records: list[dict[str, Any]], recipe: str | None = None) -> Runs:
    return Runs(name, recipe, records)


def test_seconds_count_until_a_loss_was_first_there() -> None:
    found = record((5.0, 3.0), (10.0, 2.5), (15.0, 2.6))
    assert demo_report.seconds_to(found, 2.6) == 10.0
    assert demo_report.seconds_to(found, 2.4) is None


def test_the_table_reports_how_much_sooner_and_who_never_came() -> None:
    slow = [record((10.0, 3.0), (25.0, 2.5), steps=100), record((10.0, 3.0), (24.0, 2.4), steps=110)]
    soon = [record((5.0, 2.5), (25.0, 2.1)), record((4.0, 2.3), (25.0, 2.2))]
    never = [record((5.0, 2.9), (25.0, 2.6)), record((5.0, 2.4), (25.0, 2.3))]
    text = demo_report.table([runs("plain DDP", slow), runs("soon", soon, "Int8()"), runs("never", never, "TopK()")])
    first, second, third = text.splitlines()[1:]
    assert " ".join(first.split()) == "plain DDP 105 2.450 (2.400 to 2.500) 24.5 s (24.0 to 25.0) 1.0 (1.0 to 1.0)"
    assert "2.150 (2.100 to 2.200)" in second
    assert second.endswith("4.5 s (4.0 to 5.0)  5.5 (5.0 to 6.0)")
    assert third.count("1 never") == 2


def test_every_way_differs_only_in_what_travels_and_how_fast_it_learns() -> None:
    commands = [way.command(ARGS, 3, Path("record.json")) for way in (demo.STAND_IN, *demo.RECIPES)]
    varying = {"--recipe", "--evaluate-every"}
    assert len({tuple(without(command, varying)) for command in commands}) == 1
    plain = demo.DDP.command(ARGS, 3, Path("record.json"))
    assert "--recipe" not in plain
    assert without(plain, varying)[:6] == without(commands[0], varying)[:6], "the same workers on the same network"
    for way in demo.RECIPES:
        resolve(way.recipe, demo.WORKERS)


def without(command: list[str], options: set[str]) -> list[str]:
    return [
        word
        for place, word in enumerate(command)
        if word not in options and (place == 0 or command[place - 1] not in options)
    ]


def test_names_at_the_ends_of_lines_stand_apart(tmp_path: Path) -> None:
    """Where the lines end together."""
    ways = [runs(f"way {place}", [record((1.0, 3.0), (25.0, 2.0 + 1e-3 * place))]) for place in range(4)]
    assert [way for way, _ in demo_report.named_ends(ways, 0.1)] == ways
    heights = [height for _, height in demo_report.named_ends(ways, 0.1)]
    assert min(after - before for before, after in pairwise(heights)) >= 0.1 - 1e-9
    demo_report.draw(ways, "four ways", 25.0, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
@pytest.mark.processes
def test_plain_ddp_trains_as_dense_does(tmp_path: Path) -> None:
    """The same batches from the same model: bit for bit, with two workers, whose sum is halved exactly."""
    common = ["--steps", "6", "--batch", "2", "--seed", "5", "--evaluate-every", "3"]
    files = {name: tmp_path / f"{name}.json" for name in ("ddp", "dense")}
    together("bytelm_ddp.py", *common, "--json", str(files["ddp"]))
    together("bytelm.py", *common, GOSSAMER_RECORD=str(files["dense"]))
    ddp, dense = (json.loads(file.read_text())["metrics"][METRIC] for file in files.values())
    assert [[step, loss] for step, _, loss in ddp] == [[step, loss] for step, _, loss in dense][:2]


def together(script: str, *arguments: str, **settings: str) -> None:
    """Two workers of a script, started by hand."""
    port = free_port()
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    workers = []
    for rank in range(2):
        own = {**place, "RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1, **settings}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        workers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for worker in workers:
            _, said = worker.communicate(timeout=200)
            assert worker.returncode == 0, said
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
