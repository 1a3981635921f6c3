"""A job in virtual time: steps of a planted network, estimated by the step simulator, and the rule's choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from gossamer.algorithms.recipes.auto import Auto
from gossamer.base.layout import Layout
from gossamer.comm.network import read_network
from gossamer.events import Attached
from gossamer.plan.estimate.step_time import StepTimeEstimate, estimate_step_time
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.train.auto.decision import RungChange, decide
from gossamer.train.auto.ladder import admitted
from gossamer.train.auto.measurement import MOST_STEPS, Measurement, StepSeconds, asks_for_look, slow_steps
from gossamer.train.auto.rule import Rule, RuleState
from gossamer.train.auto.rung_cost import RungCost, rung_costs
from gossamer.train.traffic.op_trace import trace_ops

WORKERS = 4
COMPUTING = 0.2  # seconds of a step
SHAPES = tuple({f"layer.{bucket}.{n}": (512, 512) for n in range(4)} for bucket in range(3))  # 12.6 MB in three buckets
RUNGS = admitted(Auto(), adaptive=False)
MODEL = Attached(
    recipe="",
    layouts=tuple(
        ("float32", Layout.of({name: torch.empty(shape) for name, shape in each.items()})) for each in SHAPES
    ),
    parameters=12 * 512**2,
    buffer_bytes=0,
    control_bytes=60,
    rank=0,
    world=WORKERS,
)


@cache
def ladder(*, adaptive: bool = False) -> tuple[RungCost, ...]:
    return rung_costs(admitted(Auto(), adaptive=adaptive), MODEL, WORKERS, adaptive=adaptive)


@cache
def step_on(rung: int, network: str, workers: int = WORKERS) -> StepTimeEstimate:
    """The truth: another program than the rule's own pricing."""
    recipe = RUNGS[rung].recipe(workers)
    compute = ladder()[rung].codec_seconds * ladder()[rung].period / len(SHAPES)
    buckets = []
    for place, shapes in enumerate(SHAPES):
        ops = trace_ops(
            recipe, Layout.of({name: torch.empty(shape) for name, shape in shapes.items()}), torch.float32, workers
        )
        buckets.append(
            BucketProfile(
                dtype="float32",
                shapes=shapes,
                ready_seconds=COMPUTING * (0.3 + 0.2 * (place + 1)),
                computing_seconds=[compute / (len(ops) + 1)] * (len(ops) + 1),
                engine_seconds=[0.0] * len(ops),
            )
        )
    profile = WorkloadProfile(
        recipe="", backward_seconds=0.9 * COMPUTING, rest_seconds=0.1 * COMPUTING, buckets=buckets, control_bytes=60
    )
    return estimate_step_time(recipe, profile, read_network(network, workers), workers)


@dataclass
class VirtualJob:
    """Steps one after the other, all ranks alike unless `slowed` says otherwise."""

    network: Callable[[float], str]  # at a virtual second
    rule: Rule = field(default_factory=Rule)
    state: RuleState = field(default_factory=RuleState)
    costs: Sequence[RungCost] = field(default_factory=ladder)
    slowed: float = 0.0  # seconds of computing more of the last rank
    probes: bool = True  # whether a look tells of the network's latency
    asking: bool = True  # whether slow steps ask for a look
    told: Callable[[int, list[Measurement]], list[Measurement]] = lambda step, measurements: measurements
    step: int = 0
    seconds: float = 0.0
    work: float = 0.0  # steps of Dense() that would have come as far
    changes: list[tuple[int, float, RungChange]] = field(default_factory=list)  # (step, second, change)
    history: list[tuple[float, int, float]] = field(default_factory=list)  # (second, rung, work) after each step
    _window: list[StepSeconds] = field(default_factory=list)
    _asks: bool = False
    _looked_at: float = 0.0

    def run(self, *, seconds: float) -> VirtualJob:
        while self.seconds < seconds:
            self.make_step()
        return self

    def make_step(self) -> None:
        network = self.network(self.seconds)
        took = step_on(self.state.rung, network)
        self._window.append(StepSeconds(took.step_seconds, took.waiting_seconds, took.wire_seconds, took.codec_seconds))
        self.seconds += took.step_seconds + self.slowed
        self.step += 1
        self.work += 1 / self.costs[self.state.rung].steps
        self.history.append((self.seconds, self.state.rung, self.work))
        asked, self._asks = self._asks, self._wants_look()
        if asked or self.step >= self.state.next_look:
            self.look(network)
            self._asks, self._looked_at = False, self.seconds

    def _wants_look(self) -> bool:
        may = self.asking and self.seconds - self._looked_at >= self.state.rest_seconds
        return may and asks_for_look(self._window[-MOST_STEPS:], self.state.usual_step)

    def _slow(self) -> Sequence[StepSeconds]:
        return slow_steps(self._window[-MOST_STEPS:], self.state.usual_step)

    def look(self, network: str) -> None:
        trip = read_network(network, WORKERS).path(0, 1).round_trip_seconds / 2
        exchange = 2 * trip if self.probes else None
        slow = self._slow()
        told = slow or self._window[-MOST_STEPS:]
        measurements = [
            Measurement(
                steps=[self._seen(step, rank) for step in told],
                covers_steps=len(slow) or self.step - self.state.looked_at,
                bytes_sent=self.costs[self.state.rung].bytes_sent,
                look_seconds=exchange,
                exchange_seconds=exchange,
            )
            for rank in range(WORKERS)
        ]
        self.state, change = decide(self.rule, self.costs, self.state, self.told(self.step, measurements), self.step)
        self._window = []
        if change is not None:
            self.changes.append((self.step, self.seconds, change))

    def _seen(self, step: StepSeconds, rank: int) -> StepSeconds:
        """All ranks end a step together; who computes longer is waited for by the others, on the wire."""
        late = self.slowed
        if rank == WORKERS - 1:
            return step._replace(seconds=step.seconds + late)
        return step._replace(seconds=step.seconds + late, waiting=step.waiting + late, wire=step.wire + late)


def work_of(rung: int, network: str, seconds: float) -> float:
    """Steps of Dense() that one rung alone would have come as far as."""
    return seconds / step_on(rung, network).step_seconds / ladder()[rung].steps


def best_work(network: str, seconds: float) -> float:
    """Of the rung that comes furthest there, if it is in force from the first second on."""
    return max(work_of(rung, network, seconds) for rung in range(len(RUNGS)))


def _report() -> None:
    """The tables of docs/explanation/auto.md: python tests/support/virtual_ladder.py"""
    print("| network | chosen | after steps | progress relative to the best rung, in 1000 s |\n|---|---|---|---:|")
    for network in (
        "10gbit,0.1ms",
        "1gbit,1ms",
        "300mbit,1ms",
        "100mbit,20ms",
        "10mbit,20ms",
        "1gbit,200ms",
        "10gbit,1s",
    ):
        job = VirtualJob(partial(_there_and_back, network, network)).run(seconds=1000)
        taken = ", ".join(f"`{RUNGS[change.after].name}`" for _, _, change in job.changes) or "`Dense()`"
        steps = ", ".join(str(step) for step, _, _ in job.changes) or "stays"
        print(f"| {network} | {taken} | {steps} | {job.work / best_work(network, job.seconds):.1%} |")
    print("\n| 600 s each | switches | equivalent steps of `Dense()` | best single rung | name |")
    print("|---|---:|---:|---:|---|")
    for usual, between in (("10gbit,0.1ms", "20mbit,1ms"), ("1gbit,1ms", "10mbit,1ms"), ("100mbit,1ms", "10mbit,1ms")):
        job = VirtualJob(partial(_there_and_back, usual, between)).run(seconds=1800)
        fixed = [work_of(rung, usual, 1200) + work_of(rung, between, 600) for rung in range(len(RUNGS))]
        best = fixed.index(max(fixed))
        numbers = f"{len(job.changes)} | {job.work:.0f} | {fixed[best]:.0f}"
        print(f"| {usual}; {between}; {usual} | {numbers} | `{RUNGS[best].name}` |")


def _there_and_back(usual: str, between: str, second: float) -> str:
    return between if 600 <= second < 1200 else usual


if __name__ == "__main__":
    _report()
