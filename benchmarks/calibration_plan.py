"""Plan of benchmarks/calibration.py: networks drawn at random, and which tasks and recipes run on each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, log
from random import Random
from typing import NamedTuple

from gossamer.algorithms.recipes.recipe import resolve

WORKERS = 4
RATES, ROUND_TRIPS = (5e6, 10e9), (0.0001, 0.15)  # bits per second; seconds: log-uniform between
SHARED_RATES, APART = (20e6, 500e6), (0.005, 0.15)  # of a line between two sites, and how far they are apart
SITES_EVERY = 4  # of so many networks one has two sites
FEWEST_STEPS, MOST_STEPS, AIM_SECONDS = 10, 40, 6.0
LONGEST_SECONDS = 15.0  # of a run's steps; on slower networks other cases run
WARM_UP = 5  # a record leaves out one of so many steps, of fewer than fifty

RECIPES = (
    "Dense()",
    "Dense(dtype='bfloat16')",
    "Int8()",
    "Float4()",
    "TopK(density=0.01)",
    "PowerSGD(rank=2)",
    "LocalSGD(period=4)",
    "DiLoCo(period=4)",
    "DelayedAveraging(delay=2)",
    "Gossip() + Ring()",
)
BETWEEN_SITES = (
    "Dense()",
    "Dense() + Hierarchy(per_node=2)",
    "Hierarchy(per_node=2, between=TopK(density=0.01))",
    "LocalSGD(period=4, per_site=2)",
    "Int8()",
)
TASKS = ("digits", "small", "base")
BASE = ("Dense()", "Int8()", "TopK(density=0.01)", "LocalSGD(period=4)")  # which the largest task runs with


class Subject(NamedTuple):
    """What is profiled once: its forecasts for all networks follow from that."""

    task: str
    recipe: str


@dataclass(frozen=True)
class DrawnNetwork:
    """A network as users write it: SPEC, or the text of a TOML file."""

    name: str
    spec: str = ""
    toml: str = ""


@dataclass(frozen=True)
class Case:
    """One run."""

    network: DrawnNetwork
    subject: Subject
    steps: int

    @property
    def key(self) -> str:
        return f"{self.network.name} | {self.subject.task} | {self.subject.recipe}"


def drawn(number: int, seed: int) -> DrawnNetwork:
    """The `number`-th network; the same for ever."""
    random = Random(f"{seed} {number}")
    if number % SITES_EVERY == SITES_EVERY - 1:
        return _two_sites(_between(random, *SHARED_RATES), _between(random, *APART))
    spec = f"{_mbit(_between(random, *RATES))},{_ms(_between(random, *ROUND_TRIPS))}"
    return DrawnNetwork(spec, spec=spec)


def _two_sites(rate: float, round_trip: float) -> DrawnNetwork:
    lines = []
    for site in ("west", "east"):
        lines += ["[[hosts]]", f"count = {WORKERS // 2}", f'site = "{site}"', 'rate = "1gbit"', ""]
        lines += ["[[paths]]", f'between = ["{site}"]', 'round_trip = "0.2ms"', ""]
    lines += ["[[paths]]", 'between = ["west", "east"]', f'round_trip = "{_ms(round_trip)}"', f'rate = "{_mbit(rate)}"']
    return DrawnNetwork(f"two sites, {_mbit(rate)},{_ms(round_trip)} between", toml="\n".join(lines) + "\n")


def _between(random: Random, low: float, high: float) -> float:
    return exp(random.uniform(log(low), log(high)))


def _mbit(bits_per_second: float) -> str:
    return f"{float(f'{bits_per_second / 1e6:.2g}'):g}mbit"


def _ms(seconds: float) -> str:
    return f"{float(f'{1000 * seconds:.2g}'):g}ms"


def subjects(network: DrawnNetwork) -> list[Subject]:
    """All that could run on a network."""
    if network.toml:
        return [Subject("small", recipe) for recipe in BETWEEN_SITES]
    return [Subject(task, recipe) for recipe in RECIPES for task in TASKS if task != "base" or recipe in BASE]


def cases(networks: int, each: int, seed: int, foretell: Callable[[Subject, DrawnNetwork], float]) -> Iterator[Case]:
    """`each` on every network, those that come next in turn and do not take too long as estimated, in seconds."""
    turns = {True: 0, False: 0}  # of the networks with sites, and of the others
    for number in range(networks):
        network = drawn(number, seed)
        every, sites = subjects(network), bool(network.toml)
        order = [every[(turns[sites] + 7 * place) % len(every)] for place in range(len(every))]  # 7: coprime to both
        fits = ((subject, steps_of(subject.recipe, foretell(subject, network))) for subject in order)
        found = [Case(network, subject, steps) for subject, steps in islice((one for one in fits if one[1]), each)]
        turns[sites] += 7 * each
        yield from found


def steps_of(recipe: str, step_seconds: float) -> int:
    """Whole periods, after those that a record leaves out as warm-up; 0 where they would take too long."""
    period = resolve(recipe, WORKERS).strategy.steady_stage.schedule.period
    fewest = max(FEWEST_STEPS, WARM_UP * period)
    wanted = min(MOST_STEPS, max(fewest, int(AIM_SECONDS / step_seconds)))
    steps = -(-wanted // (WARM_UP * period)) * WARM_UP * period
    return steps if steps * step_seconds <= LONGEST_SECONDS else 0


def spread_out(planned: Sequence[Case]) -> list[Case]:
    """One case of every network before the second of any: what was done in a part of the time is a part of all."""
    ranks: dict[str, int] = {}
    ordered = []
    for place, case in enumerate(planned):
        rank = ranks[case.network.name] = ranks.get(case.network.name, -1) + 1
        ordered.append((rank, place, case))
    return [case for *_, case in sorted(ordered, key=lambda one: one[:2])]
