"""Bytes of gossip rounds are those explained; real workers come to the same bits as simulated ones."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.gossip_rounds import Flock, draws
from support.gossip_sessions import pass_through, start
from support.processes import findings, succeed
from support.training_loops import LR, close, heard
from support.virtual_workers import Worker, cluster, loss_of, seeded
from torch import Tensor, nn

from gossamer import events
from gossamer.algorithms.compressors import Int8, TopK
from gossamer.algorithms.gossip.rules import HAT, MASS, Averaging, Choco, MixingRule, OuterMomentum, PushSum
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.topologies import Complete, Exponential, Ring, Topology
from gossamer.base.aggregation import AggregationContext
from gossamer.cli.explain import explain
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import NonFiniteError
from gossamer.train.checkpoint import digest
from gossamer.train.session.lifecycle_events import begun
from gossamer.train.synchronizers import gossip_round
from gossamer.train.synchronizers.stages import bucket_fragments
from gossamer.train.traffic.traffic import estimate_traffic

# -- what is sent -----------------------------------------------------------------------------------------------------


def sent_and_estimated(recipe: str, normed: bool = False) -> tuple[float, float]:
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
    sent, said = sent_and_estimated(recipe, normed)
    assert sent == said


def test_bytes_differ_where_the_graph_does() -> None:
    assert sent_and_estimated("Gossip() + Ring()")[0] < sent_and_estimated("Gossip()")[1]


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
        assert 1 < said["estimate"]["wire_seconds"] / (neighbors * line_seconds) < 1.15


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


# -- Gossip after workers have joined or were lost: means stay, copies begin again, and a bad worker spoils nothing

RULES: dict[str, tuple[MixingRule, Topology]] = {
    "averaging": (Averaging(), Exponential(one_peer=True)),
    "choco": (Choco(TopK(density=0.5), 0.5), Complete()),
    "push-sum": (PushSum(), Exponential(one_peer=True)),
    "noloco": (OuterMomentum(0.5, 0.5, 0.5), Exponential(one_peer=True)),
}
UNIT = 3.0**4 * 2.0**24  # halves, quarters and thirds of multiples are exact for a dozen rounds


def integers(random: Random, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    count = draws(1)[0].numel()
    return [UNIT * torch.randint(-8, 9, (count,), generator=generator).double() for _ in range(world)]


def means(flock: Flock, ranks: list[int] | None = None) -> list[Tensor]:
    """Of all that a rule keeps, over some workers; exact for integers."""
    joint = [flock.rule.joint(flock.xs[rank], flock.memories[rank]) for rank in ranks or range(flock.world)]
    total = [torch.stack(each).sum(0) for each in zip(*joint, strict=True)]
    return [each / len(joint) for each in total]


def begun_mixing(name: str, xs: list[Tensor]) -> Flock:
    rule, topology = RULES[name]
    flock = Flock(rule, topology, xs)
    flock.memories = [rule.begin(flock.mean if name == "choco" else x) for x in xs]
    return flock


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def scheduled(name: str, seed: int) -> None:
    """Rounds, losses and joins as drawn. Rounds among four, two or one: thirds of a compressed mean are not exact."""
    random = Random(f"{name} {seed}")
    flock = begun_mixing(name, integers(random, 4))
    for _ in range(6):
        world, size = flock.world, random.choice([1, 2, 4])
        stay = sorted(random.sample(range(world), random.randint(1, min(world, size))))
        kept = means(flock, stay)
        flock.change(stay, size - len(stay))
        assert same(means(flock), kept), "the change moved the mean"
        if name == "noloco":
            continue  # its rounds move the mean
        for _ in range(2):
            flock.round()
            assert same(means(flock), kept), "a round after the change moved the mean"


@pytest.mark.parametrize("name", RULES)
def test_means_stay_to_the_bit_over_losses_and_joins(name: str) -> None:
    for seed in range(24):
        scheduled(name, seed)


def test_mutant_copies_of_lost_workers_move_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choco, "keeps_copies", False)
    with pytest.raises(AssertionError, match="a round after the change"):
        test_means_stay_to_the_bit_over_losses_and_joins("choco")


@pytest.mark.parametrize("name", RULES)
def test_mutant_a_newcomer_that_counts_in_the_mean_moves_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mean_state = gossip_round._mean_state
    monkeypatch.setattr(gossip_round, "_mean_state", lambda part, world, new: mean_state(part, world, new=False))
    with pytest.raises(AssertionError, match="the change moved"):
        test_means_stay_to_the_bit_over_losses_and_joins(name)


def test_the_deviation_of_a_lost_worker_leaves_with_it() -> None:
    flock = begun_mixing("choco", draws(4)).rounds(3)
    mean, deviation = flock.mean, flock.xs[2] - flock.mean
    flock.change([0, 1, 3])
    close(flock.mean, mean - deviation / 3, 1e-14)
    close(flock.rounds(5).mean, mean - deviation / 3, 1e-13)


# -- equal to a fresh start --------------------------------------------------------------------------------------------


def afresh(flock: Flock, *, exact: bool = True) -> Flock:
    """As workers that begin from these parameters, all with the same copy."""
    other = Flock(flock.rule, flock.topology, flock.xs)
    common = flock.mean if exact else torch.zeros_like(flock.mean)
    other.memories = [flock.rule.begin(common) for _ in flock.xs]
    other.number = flock.number
    return other


CODECS = [TopK(density=0.1), Int8()]


@pytest.mark.parametrize("compressor", CODECS, ids=str)
def test_a_change_equals_a_fresh_start_from_the_same_parameters(compressor: TopK | Int8) -> None:
    flock = Flock(Choco(compressor, 0.3), Ring(), integers(Random(1), 4)).rounds(5)
    flock.change([0, 1, 2, 3])
    theirs = afresh(flock)
    assert same(flock.rounds(4).xs, theirs.rounds(4).xs)
    other = afresh(flock, exact=False)
    assert not same(flock.rounds(4).xs, other.rounds(4).xs), "the copies make no difference"


@pytest.mark.parametrize("name", ["averaging", "push-sum", "noloco"])
def test_without_copies_a_change_of_connections_changes_nothing(name: str) -> None:
    ours, theirs = (begun_mixing(name, draws(4)).rounds(3) for _ in range(2))
    assert same(ours.change([0, 1, 2, 3]).rounds(4).xs, theirs.rounds(4).xs)


def test_all_copies_are_the_same_after_a_change() -> None:
    flock = Flock(Choco(TopK(density=0.1), 0.3), Ring(), draws(5)).rounds(3)
    assert not same([flock.memories[0][HAT]], [flock.memories[1][HAT]])
    flock.change([0, 2, 4], 2)
    assert all(same([memory[HAT]], [flock.memories[0][HAT]]) for memory in flock.memories)


@pytest.mark.parametrize("rule", [Averaging(), Choco(TopK(density=1.0), 1.0)], ids=["dense", "identity"])
def test_complete_and_lossless_is_the_mean_of_those_who_are_there(rule: MixingRule) -> None:
    flock = Flock(rule, Complete(), draws(4))
    flock.memories = [rule.begin(flock.mean) for _ in flock.xs]
    flock.change([0, 1, 3])
    mean = flock.mean
    for x in flock.round() and flock.xs:
        close(x, mean, 1e-14)
    flock.xs = draws(3)
    mean = flock.mean
    flock.change([0, 1, 2], 1)
    for x in flock.round() and flock.xs:
        close(x, mean, 1e-14)


def test_push_sum_keeps_its_masses() -> None:
    flock = begun_mixing("push-sum", draws(3)).rounds(3)
    flock.memories[0][MASS].mul_(3)
    kept = [memory[MASS].clone() for memory in flock.memories]
    flock.change([0, 2], 1)
    assert same([memory[MASS] for memory in flock.memories[:2]], [kept[0], kept[2]])
    assert float(flock.memories[2][MASS]) == float(kept[0] + kept[2]) / 2


# -- bad numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_a_worker_that_is_not_finite_does_not_count(name: str, spoiled: float) -> None:
    flock = begun_mixing(name, integers(Random(2), 3))
    flock.xs[1][5] = spoiled
    kept = means(flock, [0, 2])
    flock.change([0, 1, 2], 1)
    joint = flock.rule.joint(flock.xs[3], flock.memories[3])
    assert same(list(joint), kept)


def test_nobody_with_finite_parameters_ends_the_run() -> None:
    flock = begun_mixing("choco", draws(2))
    for x in flock.xs:
        x[0] = torch.nan
    with pytest.raises(NonFiniteError, match="no worker has finite parameters"):
        flock.change([0, 1])


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Averaging(), Choco(TopK(density=0.5), 0.5), PushSum(), OuterMomentum(0.5, 0.5, 0.5)])
def test_means_of_half_precision_are_rounded_once(rule: MixingRule) -> None:
    xs = [x.bfloat16() for x in draws(3)]
    flock = Flock(rule, Complete(), xs)
    flock.memories = [rule.begin(x) for x in xs]
    flock.change([0, 1, 2], 1)
    assert torch.equal(flock.xs[3], torch.stack([x.float() for x in xs]).sum(0).div(4).mul(4).div(3).bfloat16())
    assert flock.xs[3].dtype == torch.bfloat16


def test_renewal_asks_for_nothing_that_is_not_needed() -> None:
    """Of a loss, without copies: not even an operation that all must begin."""

    def ops(name: str, *, joined: bool) -> int:
        flock = begun_mixing(name, draws(2))
        part = gossip_round.MixedTensors(
            flock.rule, gossip_round.FlatTensors(flock.xs[0], flock.layout), flock.memories[0]
        )
        try:
            gossip_round.renewed([part], 2, joined=joined, new=False).send(None)
        except StopIteration:
            return 0
        return 1

    assert [ops(name, joined=False) for name in RULES] == [0, 1, 0, 0]
    assert [ops(name, joined=True) for name in RULES] == [1, 1, 1, 1]
