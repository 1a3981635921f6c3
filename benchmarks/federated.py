"""Federated learning: rounds, bytes and simulated time to 95 % of the digits, strategies beside compressors.

A hundred devices of examples/federated_digits.py, divided by Dirichlet 0.1, at 1 Mbit/s up and 10 Mbit/s down, compute
drawn around 5 ms a sample, ten of them at once. A run ends once the mean of its last five accuracies on unseen digits
is 95 %. Each row is tuned alike: every learning rate of the grid on a seed of its own, and the one with the fewest
bytes up is then run on five other seeds. Runs are kept in runs/federated.json: what is there is not trained again.

    python benchmarks/federated.py --page docs/benchmarks/federated-compression.md  # trains missing runs, then writes
    python benchmarks/federated.py --report --page docs/benchmarks/federated-compression.md
    python benchmarks/federated.py --quick                      # everything once, a few rounds
    python benchmarks/federated.py --verify --strategies FedAvg --compressors "Int8()" --rates 0.5
"""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import kept
from benchmarks.markdown_tables import named_rows
from benchmarks.page import put_between
from benchmarks.provenance import QUICK, ROOT, commit, scratch

SCRIPT = ROOT / "examples" / "federated_digits.py"
RUNS = ROOT / "runs" / "federated.json"
CLIENTS, FRACTION = 100, 0.1
CONTRIBUTIONS, REPORT_BYTES = round(CLIENTS * FRACTION), 155  # of a round; of a report as JSON, with one metric
TARGET, SMOOTHED = 0.95, 5  # accuracy, and over how many rounds it is averaged
UP, DOWN, ROUND_TRIP = 1e6, 1e7, 0.06  # bits per second, seconds
PASSES, RATES = 5, (0.25, 0.5, 1.0)  # of a device over its data; the grid: its learning rate
TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
SPARSE = "Chain(TopK(density=0.01), Int8())"
EVERYWHERE = f"Route({SPARSE}, rest={SPARSE})"  # biases too, which go as they are otherwise
FEWER = "Chain(TopK(density=0.003), Int8())"
FEWER_EVERYWHERE = f"Route({FEWER}, rest={FEWER})"
STRATEGIES = {
    "FedAvg": "FedAvg(fraction={fraction}, local_epochs={epochs})",
    "FedProx": "FedProx(mu=0.1, fraction={fraction}, local_epochs={epochs})",
    "SCAFFOLD": "SCAFFOLD(fraction={fraction}, local_epochs={epochs})",
    "FedBuff": "FedBuff(buffer=10, fraction={fraction}, local_epochs={epochs})",
}
COMPRESSORS = ("Dense()", "Int8()", SPARSE, EVERYWHERE)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run: everything that decides its numbers but the code."""

    strategy: str
    compressor: str
    rate: float
    seed: int
    most_rounds: int
    pull: str = ""  # compressor of what devices pull

    @property
    def recipe(self) -> str:
        text = STRATEGIES[self.strategy].format(fraction=FRACTION, epochs=PASSES)
        if self.pull:
            text = f"{text.removesuffix(')')}, pull={self.pull})"
        return f"{text} + {self.compressor}"


Run = dict[str, Any]


def run(setting: Setting) -> Run:
    """Train until the target or the last round, by the same scripts that real devices run."""
    import torch

    import gossamer.federated
    from gossamer.federated import Round, Update
    from gossamer.federated.client.functions import load_script
    from gossamer.federated.population import drawn_profiles

    torch.set_num_threads(1)
    script = load_script(SCRIPT, ["--rate", str(setting.rate), "--batch", "64", "--seed", str(setting.seed)])
    profiles = drawn_profiles(
        CLIENTS,
        setting.seed,
        up_bits_per_second=UP,
        down_bits_per_second=DOWN,
        link_sigma=0.0,
        round_trip_seconds=ROUND_TRIP,
        samples_per_step=16,
        present_seconds=86_400.0,
    )
    last: deque[float] = deque(maxlen=SMOOTHED)

    def evaluate(model: torch.nn.Module, told: Round) -> Update:
        assert script.evaluate is not None
        update = script.evaluate(model, told)
        last.append(update.metrics["accuracy"])
        smoothed = sum(last) / SMOOTHED  # too low before there are enough
        return Update(samples=update.samples, metrics={"accuracy": last[-1], "smoothed": smoothed})

    began = time.perf_counter()
    found = gossamer.federated.simulate(
        script.train,
        script.model,
        setting.recipe,
        clients=CLIENTS,
        rounds=setting.most_rounds,
        evaluate=evaluate,
        profiles=profiles,
        seed=setting.seed,
        until=f"smoothed>={TARGET}",
    )
    points = [
        (each.up_bytes, each.down_bytes, each.virtual_seconds, round(each.metrics["accuracy"], 4))
        for each in found.rounds
    ]
    return {
        "setting": asdict(setting),
        "reached": found.ended == "reached",
        "points": points,
        "seconds": round(time.perf_counter() - began, 1),
        "commit": commit(),
    }


def all_rows() -> Iterator[tuple[str, str, str]]:
    """Strategy, compressor and pull compressor of every row."""
    for strategy in STRATEGIES:
        for compressor in COMPRESSORS:
            yield strategy, compressor, ""
    yield "FedAvg", FEWER_EVERYWHERE, ""
    yield "FedAvg", EVERYWHERE, EVERYWHERE  # both directions


def available(strategy: str) -> bool:
    """Whether this version of Gossamer has it."""
    from gossamer.algorithms.recipes.catalog import NOUNS

    return strategy in NOUNS


class Record:
    """Runs that were made, and those still to make."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Run] = kept.read(path)

    def of(self, **fields: Any) -> list[Run]:
        return [each for each in self.runs if all(each["setting"][key] == value for key, value in fields.items())]

    def add(self, made: Run) -> None:
        self.runs.append(made)
        kept.write(self.path, {"runs": self.runs})

    def make(self, settings: Sequence[Setting], jobs: int) -> None:
        missing = [each for each in settings if not self.of(**asdict(each))]
        with ProcessPoolExecutor(jobs) as pool:
            for done, future in enumerate(as_completed([pool.submit(run, each) for each in missing]), 1):
                made = future.result()
                self.add(made)
                told, how = made["setting"], "reached" if made["reached"] else "not reached"
                name = " + ".join(filter(None, [told["strategy"], told["compressor"], told["pull"] and "pull"]))
                print(
                    f"{done} of {len(missing)}: {name}, rate {told['rate']}, seed "
                    f"{told['seed']}: {how} after {len(made['points'])} rounds, {made['seconds']} s",
                    flush=True,
                )


def sent(points: Sequence[Sequence[float]]) -> float:
    """Bytes up: payloads, and beside each the report that says what was done."""
    return sum(point[0] for point in points) + len(points) * CONTRIBUTIONS * REPORT_BYTES


def cost(made: Run) -> float:
    """Bytes up where the target was reached; beyond all of these, by the accuracy that was, otherwise."""
    up = float(sent(made["points"]))
    return up if made["reached"] else 1e15 * (2 - max(point[3] for point in made["points"]))


def tuned(record: Record, row: tuple[str, str, str]) -> Run:
    """The best of the grid."""
    strategy, compressor, pull = row
    return min(record.of(strategy=strategy, compressor=compressor, pull=pull, seed=TUNING_SEED), key=cost)


def main(args: argparse.Namespace) -> None:
    from benchmarks.federated_report import draw, finals, write_part

    if args.verify:
        args.page = args.page or ROOT / "docs" / "benchmarks" / "federated-compression.md"
        (QUICK / "federated.json").unlink(missing_ok=True)
    record = Record(QUICK / "federated.json" if args.quick or args.verify else RUNS)
    rows = [row for row in all_rows() if available(row[0])]
    due = [row for row in rows if not args.strategies or row[0] in args.strategies]
    due = [row for row in due if not args.compressors or row[1] in args.compressors]
    rounds, seeds = (3, SEEDS[:1]) if args.quick else (args.rounds, SEEDS[: args.seeds])
    rates = RATES[:1] if args.quick else args.rates
    if not args.report:
        grid = [
            Setting(strategy=s, compressor=c, pull=p, rate=r, seed=TUNING_SEED, most_rounds=rounds)
            for s, c, p in due
            for r in rates
        ]
        record.make(grid, args.jobs)
        best = [Setting(**tuned(record, row)["setting"]) for row in due]
        record.make([Setting(**(asdict(each) | {"seed": seed})) for seed in seeds for each in best], args.jobs)
    trained = [row for row in rows if finals(record, row)]
    if args.verify:
        kept.verify_rows(
            args.page, "federated", named_rows(write_part(record, trained)), ignored=["rate", "times fewer"]
        )
    elif args.page:
        page = scratch(args.page) if args.quick else args.page
        put_between(page, "federated", write_part(record, trained))
        draw(record, trained, page.with_name("federated.png"))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Bytes and time to an accuracy, on devices unlike each other.")
    options.add_argument("--page", type=Path, help="where to write the table, with the picture beside it")
    options.add_argument("--report", action="store_true", help="train nothing")
    options.add_argument("--quick", action="store_true", help="a few rounds of everything, to see that it runs")
    options.add_argument("--rounds", type=int, default=200, help="after which a run is given up")
    options.add_argument("--seeds", type=int, default=len(SEEDS))
    options.add_argument("--strategies", nargs="+", choices=STRATEGIES, help="train these rows only, for now")
    options.add_argument("--compressors", nargs="+", choices=COMPRESSORS, help="train these rows only, for now")
    options.add_argument("--rates", nargs="+", type=float, default=RATES, help="the grid")
    options.add_argument(
        "--verify", action="store_true", help="train rows again, and compare them with those of --page"
    )
    options.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="runs at once")
    main(options.parse_args())
