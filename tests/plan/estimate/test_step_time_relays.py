"""Network files with relays: each command estimates the seconds that the lines of the relay allow."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.paths import EXAMPLES

from gossamer.algorithms.collectives import HubAllReduce
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.ops import AllReduceMean
from gossamer.base.transport import Transport
from gossamer.cli.explain import explain
from gossamer.comm.mesh.collective_selector import CollectivePrices
from gossamer.comm.mesh.link_measurement import Links, RelayLine
from gossamer.comm.network import Network, parse, read_network
from gossamer.comm.network.cost.cheapest_collective import chosen_collective
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.comm.network.tcp_model import ETHERNET
from gossamer.comm.simulated import SimulatedGroup
from gossamer.comm.throttled import ThrottledTransport
from gossamer.plan.advise.candidates import Candidate
from gossamer.plan.advise.prices import StepPricer, estimate_all
from gossamer.plan.advise.thresholds import with_rate
from gossamer.plan.profile.profile_runs import assume_profile
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.plan.simulate import ForecastClock, NetworkSchedule

WORKERS, PARAMETERS, STEP_SECONDS = 4, 1_000_000, 0.05
NBYTES = 4 * PARAMETERS
UP, RELAYED = 20e6, 30e6
FILE = """
[[hosts]]
site = "office"
rate = "{office}"
[[hosts]]
count = 3
site = "home"
up = "{up}"
down = "1gbit"
[[relays]]
between = ["home", "home"]
through = "office"
"""


@pytest.fixture(autouse=True)
def _no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_COLLECTIVE", raising=False)


@pytest.fixture
def homes(tmp_path: Path) -> str:
    """The office of rank 0 relays between three homes with slow uploads."""
    return written(tmp_path, office="1gbit", up="20mbit")


@pytest.fixture
def narrow(tmp_path: Path) -> str:
    """The office's line is the slowest."""
    return written(tmp_path, office="30mbit", up="1gbit")


def written(folder: Path, **rates: str) -> str:
    file = folder / "homes.toml"
    file.write_text(FILE.format(**rates))
    return str(file)


# -- the same step in all commands -------------------------------------------------------------------------------------
# Each home sends the gradients to the hub once. Without the relay the fewest bytes of the busiest home are 2 (n-1) / n
# of them, and computing hides 2/3 of a step at most.

LEAST = 8 * NBYTES / UP
MOST = 1.15 * 8 * ETHERNET.wire_bytes(NBYTES) / UP
WITHOUT = 2 * (WORKERS - 1) / WORKERS * LEAST


def by_explain(network: str) -> float:
    """`gossamer explain`, whose step of the least computing time waits for the network."""
    options = ["--workers", str(WORKERS), "--parameters", str(PARAMETERS), "--step-seconds", str(STEP_SECONDS)]
    file = Path(network).with_suffix(".json")
    found = CliRunner().invoke(explain, ["Dense()", "--network", network, *options, "--json", str(file)])
    assert found.exit_code == 0, found.output
    return float(json.loads(file.read_text())["estimate"]["step_seconds"])


def by_simulate(network: str) -> float:
    recipe = resolve("Dense()", WORKERS)
    profile = assume_profile(assumed(PARAMETERS, recipe), recipe, STEP_SECONDS, WORKERS)
    clock = ForecastClock(lambda _: profile, NetworkSchedule.read(f"unlimited; {network} at 9s", WORKERS), WORKERS)
    assert clock.step(recipe, 8.0).seconds < 2 * STEP_SECONDS
    return clock.step(recipe, 9.0).seconds


def by_advise(network: str) -> float:
    recipe = resolve(None, WORKERS)
    base = assume_profile(assumed(PARAMETERS, recipe), recipe, STEP_SECONDS, WORKERS)
    pricer = StepPricer(base, WORKERS)
    found = read_network(network, WORKERS)
    (price,) = estimate_all([Candidate(recipe="Dense()")], base, found, WORKERS, pricer=pricer)
    assert price.step_seconds is not None
    faster = pricer.seconds(resolve("Dense()", WORKERS), with_rate(found, 10 * UP))
    assert faster < price.step_seconds / 5  # thresholds scale the lines of the relay, too
    return price.step_seconds


def by_pacing(network: str) -> float:
    """The delay of `gossamer run`, `compare` and `rehearse` where relays cannot be emulated."""
    transport: Transport = SimulatedGroup(WORKERS).transports[0]
    op = AllReduceMean(torch.empty(PARAMETERS, device="meta"))
    price = ThrottledTransport(transport, read_network(network, WORKERS))._price(op)
    return price.line_seconds + price.way_seconds


COMMANDS = {"explain": by_explain, "simulate": by_simulate, "advise": by_advise, "pacing": by_pacing}


def check_a_step_takes_as_long_as_the_upload_of_a_home(command: Callable[[str], float], homes: str) -> None:
    assert LEAST <= command(homes) <= MOST + STEP_SECONDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_step_takes_as_long_as_the_upload_of_a_home(command: str, homes: str) -> None:
    check_a_step_takes_as_long_as_the_upload_of_a_home(COMMANDS[command], homes)


def without_relays(*_: object) -> tuple[tuple[()], dict[frozenset[int], int]]:
    """Mutant: the entry is ignored."""
    return (), {}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_parser_that_ignores_the_relay_is_detected(command: str, homes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "_relays", without_relays)
    assert COMMANDS[command](homes) >= 0.95 * WITHOUT
    with pytest.raises(AssertionError):
        check_a_step_takes_as_long_as_the_upload_of_a_home(COMMANDS[command], homes)


def test_the_example_is_faster_by_its_hub_than_directly() -> None:
    op = AllReduceMean(torch.empty(PARAMETERS, device="meta"))
    network = read_network(str(EXAMPLES / "networks" / "two-homes.toml"), WORKERS)
    assert network.relayed == {frozenset((1, 2)): 0}
    assert LEAST <= seconds(op, network) <= MOST + 0.2  # slow start at 40 ms
    assert seconds(op, network, collective="direct") >= WITHOUT


# -- the lines of the relay --------------------------------------------------------------------------------------------


def check_the_relay_carries(collective: str, tensors: float, network: Network) -> None:
    op = AllReduceMean(torch.empty(PARAMETERS, device="meta"))
    took = seconds(op, network, collective=collective)
    bits = 8 * tensors / RELAYED
    assert bits * NBYTES <= took <= 1.15 * bits * ETHERNET.wire_bytes(NBYTES)


@pytest.mark.parametrize(
    ("collective", "tensors"),
    [("direct", 2 * (WORKERS - 1) ** 2 / WORKERS), ("ring", 2 * (WORKERS - 1) ** 2 / WORKERS), ("hub", WORKERS - 1)],
)
def test_a_mean_takes_as_long_as_the_bytes_that_pass_the_relay(collective: str, tensors: float, narrow: str) -> None:
    network = read_network(narrow, WORKERS)
    check_the_relay_carries(collective, tensors, network)
    if collective != "hub":  # mutant: the pairs of homes do not load the office
        with pytest.raises(AssertionError):
            check_the_relay_carries(collective, tensors, replace(network, relayed={}))


@pytest.mark.parametrize("nbytes", [40_000, 400_000, 4_000_000])
def test_the_collective_is_that_on_measured_links(nbytes: int, homes: str) -> None:
    """The links that an elastic run with a relay on the machine of rank 0 measures."""
    alone = ((0.0,) * WORKERS,) * WORKERS
    relayed = [[int(0 not in (a, b) and a != b) for b in range(WORKERS)] for a in range(WORKERS)]
    links = Links(
        round_trips=alone,
        up=(1e9, UP, UP, UP),
        down=(1e9,) * WORKERS,
        losses=alone,
        relays=(RelayLine(0, 0, 1e9, 1e9),),
        relayed=tuple(map(tuple, relayed)),
    )
    described = read_network(homes, WORKERS)
    assert described.relayed == links.network.relayed == {frozenset(pair): 0 for pair in combinations((1, 2, 3), 2)}
    measured = CollectivePrices().choice((nbytes, 4), links)
    assert chosen_collective("auto", nbytes, 4, described) == measured == HubAllReduce(hub=0)
