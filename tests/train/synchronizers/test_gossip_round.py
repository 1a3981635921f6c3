"""Bytes of gossip rounds are those explained; real workers come to the same bits as simulated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.gossip_sessions import pass_through, start
from support.processes import findings, succeed
from support.training_loops import LR, heard
from support.virtual_workers import Worker, cluster, loss_of, seeded
from torch import nn

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.cli.explain import explain
from gossamer.comm.simulated import SimulatedGroup
from gossamer.train.checkpoint import digest
from gossamer.train.session.lifecycle_events import begun
from gossamer.train.synchronizers.stages import bucket_fragments
from gossamer.train.traffic.traffic import estimate_traffic

# -- what is sent -----------------------------------------------------------------------------------------------------


def sent_and_foretold(recipe: str, normed: bool = False) -> tuple[float, float]:
    """Bytes of a worker and a step: as the transport counts them over whole cycles, and as they are explained."""
    found = resolve(recipe, 4)

    def make() -> nn.Module:
        layers = [nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 30)] if normed else [nn.Linear(6, 40)]
        return nn.Sequential(*layers, nn.Linear(30 if normed else 40, 3))

    def work(worker: Worker) -> None:
        with seeded(worker.rank):
            model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        worker.attach(model, optimizer, found)
        for step in range(16):
            loss_of(model, step, worker.rank).backward()
            optimizer.step()

    with heard(events.StepEnded) as ended:
        cluster(work, 4)
    model, alone = make(), SimulatedGroup(1).transports[0]
    fragments = bucket_fragments(
        found.strategy.steady_stage, dict(model.named_parameters()), found.compressor, AggregationContext()
    )
    said = estimate_traffic(found, begun(model, None, found, fragments, alone), workers=4)
    last = [event.bytes_sent for event in ended if event.step > 4]  # the very first compares batches as well
    return sum(last) / len(last), said.bytes_sent


@pytest.mark.parametrize(
    ("recipe", "normed"),
    [
        ("Gossip() + Ring()", False),
        ("Gossip() + Ring()", True),
        ("Gossip(period=2) + TopK(0.1) + Ring()", False),
        ("Gossip() + Int8()", True),
        ("Gossip('push-sum') + Exponential(one_peer=True)", True),
        ("Gossip(period=4) + RandomPeers()", False),
    ],
)
def test_bytes_are_those_explained(recipe: str, normed: bool) -> None:
    sent, said = sent_and_foretold(recipe, normed)
    assert sent == said


def test_bytes_differ_where_the_graph_does() -> None:
    assert sent_and_foretold("Gossip() + Ring()")[0] < sent_and_foretold("Gossip()")[1]


def explained(recipe: str, path: Path) -> Any:
    options = ["--workers", "4", "--parameters", "1000000", "--network", "100mbit,20ms", "--step-seconds", "0.1"]
    result = CliRunner().invoke(explain, [recipe, *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_explain_prices_a_round_among_neighbours(tmp_path: Path) -> None:
    ring, everyone = (explained(recipe, tmp_path / "said") for recipe in ("Gossip() + Ring()", "Gossip()"))
    ops = [(each["where"], each["word"], each["bytes_sent"]) for each in ring["words"] if each["bytes_sent"]]
    assert ops == [("bucket 0", "Mix", 8_000_000), ("control", "Mix", 64), ("meetings", "Gather", 24)]
    line_seconds = 8 * 4_000_000 / 100e6
    for said, neighbors in ((ring, 2), (everyone, 3)):
        assert 1 < said["foretold"]["wire_seconds"] / (neighbors * line_seconds) < 1.15


# -- real processes ---------------------------------------------------------------------------------------------------


SCRIPT = """
import json
import torch
import gossamer
from gossamer.train.checkpoint import digest
from support.virtual_workers import network, train_step

world = gossamer.init()
for recipe in {recipes!r}:
    model = network(world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.attach(model, optimizer, recipe) as session:
        with session.epoch():
            for step in range(5 + world.rank):
                train_step(model, optimizer, step, world.rank)
        own = digest(model.parameters())
        with session.averaged_parameters(model):
            print("said", json.dumps(dict(own=own, merged=digest(model.parameters()))), flush=True)
"""
RECIPES = ["Gossip() + TopK(0.2) + Ring()", "Gossip('push-sum') + Exponential(one_peer=True)"]


@pytest.mark.processes
def test_real_workers_come_to_the_same_bits_as_simulated_ones() -> None:
    def work(worker: Worker, recipe: str) -> str:
        session = start(worker, recipe)
        with session.epoch():
            pass_through(session, range(5 + worker.rank), worker.rank)
        return digest(session.model.parameters())

    said = [findings(text) for text in succeed(["-c", SCRIPT.format(recipes=RECIPES)], 3)]
    for place, recipe in enumerate(RECIPES):
        assert len({each[place]["merged"] for each in said}) == 1
        own = [each[place]["own"] for each in said]
        assert own == cluster(lambda worker, recipe=recipe: work(worker, recipe), 3)
    assert len({each["own"] for each in said[0]}) == 2, "all recipes do the same"
