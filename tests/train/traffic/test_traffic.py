"""Traffic estimates: bytes sent and remembered by a recipe, from shapes."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
import torch
from support.expected_traffic import WORKERS, other, ring
from support.virtual_workers import batch, cluster, network, seeded, subscribed
from torch import nn

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import coded_bytes
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import simulate
from gossamer.errors import AttachError
from gossamer.events import Attached, StepEnded
from gossamer.plan.profile.synthetic_shapes import assumed, assumed_shapes
from gossamer.train.engine.step_decision import STANDING_BYTES, control_bytes
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import estimate_traffic

SHAPES = {"a": (64, 32), "b": (7,), "c": (10, 20), "d": (16, 3, 5, 5), "e": (300,), "f": ()}
MATRICES = {"a": (64, 32), "d": (16, 75)}  # "c" has fewer than 256 entries
REST = 7 + 200 + 300 + 1


def said_of(text, shapes=SHAPES, workers=WORKERS, dtype="float32", buffer_bytes=0, control_bytes=0):
    recipe = resolve(text)
    model = Attached(
        recipe=text,
        layouts=((dtype, Layout.of(shapes)),),
        parameters=sum(map(math.prod, shapes.values())),
        buffer_bytes=buffer_bytes,
        control_bytes=control_bytes,
        rank=0,
        world=1,
    )
    return estimate_traffic(recipe, model, workers=workers)


def gathers(text):
    return [(op.op, op.bytes_sent) for op in said_of(text).buckets[0]]


def test_dense_is_the_ring():
    numel = sum(map(math.prod, SHAPES.values()))
    assert gathers("Dense") == [("Mean", ring(4 * numel))]
    assert gathers("Dense('bfloat16')") == [("Mean", ring(2 * numel))]
    assert said_of("Dense").dense_bytes_sent == ring(4 * numel)


def test_topk_sends_values_and_places_of_the_largest():
    kept = sum(max(1, round(0.05 * math.prod(shape))) for shape in MATRICES.values())
    code = coded_bytes(kept, sum(math.prod(shape) for shape in MATRICES.values()))
    assert gathers("TopK(0.05)") == [("Gather", (WORKERS - 1) * (4 * kept + code)), ("Mean", ring(4 * REST))]


def test_int8_sends_a_byte_each_and_a_scale_per_block():
    sizes = [math.prod(shape) for shape in MATRICES.values()]
    sent = (WORKERS - 1) * sum(size + 4 * math.ceil(size / 100) for size in sizes)
    assert gathers("Int8(block=100)") == [("Gather", sent), ("Mean", ring(4 * REST))]


def test_powersgd_sends_two_factors():
    rows, cols = (sum(sides) for sides in zip(*MATRICES.values(), strict=True))
    first, second = ring(4 * (2 * rows + REST)), ring(4 * 2 * cols)
    assert gathers("PowerSGD(rank=2)") == [("Mean", first), ("Mean", second)]


def test_memory_is_a_residual_per_compressed_entry_and_the_factor():
    numel = sum(map(math.prod, MATRICES.values()))
    assert (said_of("TopK(0.05)").residual_bytes, said_of("TopK(0.05)").other_state_bytes) == (4 * numel, 0)
    said = said_of("Sharded(Int8)")
    assert (said.residual_bytes, said.other_state_bytes) == (4 * (numel + math.ceil(numel / WORKERS)), 0)
    said = said_of("PowerSGD(rank=2)")
    assert (said.residual_bytes, said.other_state_bytes) == (4 * numel, 4 * 2 * (32 + 75))
    said = said_of("PowerSGD(rank=2, feedback=False)")
    assert (said.residual_bytes, said.other_state_bytes) == (0, 4 * 2 * (32 + 75))
    assert said_of("TopK(0.05)", dtype="torch.bfloat16").residual_bytes == 4 * numel


def test_the_total_has_control_and_buffers():
    said = said_of("TopK(0.05)", buffer_bytes=400, control_bytes=22)
    control = (WORKERS - 1) * (22 + STANDING_BYTES)
    assert other(said, "control") == control
    assert other(said_of("Dense", control_bytes=22), "control") == (WORKERS - 1) * 22
    assert other(said, "buffers") == 3 / 4 * 400
    ops = sum(sent for _, sent in gathers("TopK(0.05)"))
    assert said.bytes_sent == said.cycle_bytes_sent == ops + control + 300
    assert said.share_of_dense == said.bytes_sent / said.dense_bytes_sent


def test_a_world_of_one_sends_nothing():
    said = said_of("TopK(0.05)", workers=1, buffer_bytes=400, control_bytes=22)
    assert (said.bytes_sent, said.share_of_dense) == (0, None)


@pytest.mark.parametrize(
    "text",
    [
        "Dense",
        "Dense('bfloat16')",
        "TopK(0.05)",
        "Int8",
        "PowerSGD(rank=2)",
        "TopK(0.01)",
        "Float4",
        "Sharded(Int8(block=7))",
        "Sharded(OneBit)",
    ],
)
def test_the_forecast_is_what_real_tensors_send(text):
    layout, compressor = Layout.of(SHAPES), resolve(text).compressor
    sent = []

    def worker(rank):
        at = AggregationContext(rank=rank, world=WORKERS)
        x = FlatTensors(torch.arange(float(layout.numel)), layout)
        script, answer = compressor.aggregate(x, compressor.init(x, at), at), None
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            sent.append(op.bytes_sent(WORKERS, rank))
            answer = yield op

    simulate([worker(rank) for rank in range(WORKERS)])
    assert sum(sent) / WORKERS == sum(op.bytes_sent for op in said_of(text).buckets[0])


@pytest.mark.parametrize("text", ["Dense", "Dense('bfloat16')", "TopK(0.05)", "PowerSGD(rank=2)", "TopK(0.01)"])
def test_a_conversation_is_what_is_priced(text):
    recipe, layout = resolve(text), Layout.of(SHAPES)
    ops = trace_ops(recipe, layout, torch.float32, WORKERS)
    priced = said_of(text).buckets[0]
    assert sum(op.bytes_sent(WORKERS) for op in ops) == sum(op.bytes_sent for op in priced)
    with_control = trace_ops(recipe, layout, torch.float32, WORKERS, control_bytes=23)
    assert len(with_control) == len(ops)
    assert with_control[0].bytes_sent(WORKERS) == ops[0].bytes_sent(WORKERS) + 3 * 23
    assert all(tensor.is_meta for tensor in ops[0].tensors())


def test_a_warm_up_is_over_when_a_step_is_priced():
    assert gathers("Warmup(TopK(0.05), steps=1000)") == gathers("TopK(0.05)")
    assert gathers("DGC(0.05, warmup=1000)") == gathers("DGC(0.05)")


def test_talking_less_sends_less():
    every, seldom = (
        estimate_traffic(resolve(text), assumed(10**5, resolve(text)), workers=4) for text in ("Dense", "DiLoCo(50)")
    )
    assert every.bytes_sent / 51 < seldom.bytes_sent < every.bytes_sent / 49
    assert seldom.share_of_dense == seldom.bytes_sent / seldom.dense_bytes_sent
    four = estimate_traffic(resolve("EveryStep(accumulate=4)"), assumed(10**5, resolve(None)), workers=4)
    assert (four.passes, four.steps, four.bytes_sent) == (4, 1, every.bytes_sent)
    assert four.share_of_dense == every.share_of_dense / 4


@pytest.mark.parametrize(
    ("strategy", "copies"),
    [
        ("EveryStep()", 0),
        ("EveryStep(accumulate=4)", 1),
        ("EveryStep(delay=2)", 2),
        ("LocalSGD(4)", 1),
        ("PostLocalSGD(4, start=10)", 1),
        ("DiLoCo(8, fragments=2, delay=3)", 2),
        ("DiLoCo(8, outer_momentum=0)", 1),
        ("DelayedAveraging(delay=3)", 2 + 2 * 3),
        ("DelayedAveraging(delay=3, period=2)", 2 + 2 * 2),
    ],
)
def test_strategies_keep_copies_of_the_parameters(strategy, copies):
    recipe = resolve(strategy)
    said = estimate_traffic(recipe, assumed(10**5, recipe), workers=4)
    assert said.strategy_bytes == copies * 4 * 10**5
    assert (said.residual_bytes, said.other_state_bytes) == (0, 0)


# -- models that are assumed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [1, 63, 64, 65, 50_000, 66_000, 1_000_003, 124_000_000, 10**11])
def test_assumed_shapes_have_exactly_the_size_asked_for(parameters):
    shapes = assumed_shapes(parameters)
    assert sum(map(math.prod, shapes.values())) == parameters
    assert all(math.prod(shape) > 0 for shape in shapes.values())


def test_assumed_shapes_look_like_a_known_model():
    shapes = assumed_shapes(124_000_000)
    assert shapes["layer.11.up.weight"] == (3072, 768)
    assert "layer.12.up.weight" not in shapes
    assert shapes["embedding.weight"][1] == 768


def test_assumed_buckets_are_those_of_a_session():
    model = assumed(20_000_000, resolve("TopK(0.01)"))
    assert len(model.layouts) > 1
    assert sum(layout.numel for _, layout in model.layouts) == model.parameters == 20_000_000
    assert model.control_bytes == control_bytes(sum(len(layout) for _, layout in model.layouts))
    for dtype, layout in model.layouts:
        assert dtype == "float32"
        ways = [len(slot.shape) < 2 for slot in layout]
        assert all(before <= after for before, after in pairwise(ways))  # dense ones last


def test_assumed_momenta_are_adams():
    recipe = resolve("DiLoCo(8, fragments=2, optimizer_state='average')")
    said = estimate_traffic(recipe, assumed(10**5, recipe), workers=4)
    assert other(said, "averaged along") == ring(4 * 2 * 10**5)
    assert len(assumed(10**5, recipe).rider_bytes) == 2


def test_fragments_need_tensors():
    with pytest.raises(AttachError, match="cannot be divided into 40 fragments"):
        assumed(100, resolve("DiLoCo(50, fragments=40)"))


@pytest.mark.parametrize(
    ("recipe", "pushed", "pulled"),
    [
        ("AsyncDiLoCo(period=10)", 1.0, 1.0),
        ("AsyncDiLoCo(period=10, fragments=2)", 1.0, 1.0),
        ("AsyncDiLoCo(period=10, quorum=4, pull=Int8())", 1.0, 0.25),
        ("AsyncDiLoCo(period=10, quorum=2, pull=Int8())", 1.0, 0.5),
        ("AsyncDiLoCo(period=10, pull=Int8()) + Int8()", 0.25, 1.0),
    ],
)
def test_local_training_on_servers_sends_once_per_period(recipe: str, pushed: float, pulled: float) -> None:
    """In units of the parameters; a compressed answer has a difference for each merge, or all parameters."""
    found = said_of(recipe, {"weight": (512, 64), "other": (512, 64)}, workers=4)
    parameters = 4 * found.parameters * 3 / 4  # what is not on this worker's server
    assert found.steps == 10
    for op, share in (("Push", pushed), ("Reply", pulled)):
        sent = sum(item.bytes_sent for item in found.others if item.op == op)
        assert sent == pytest.approx(share * parameters, rel=0.1)


# -- traffic estimates against what sessions send, to the byte ---------------------------------------------------------


@dataclass
class Listener:
    """What the sessions of one thread per rank announce, and the bytes of their steps."""

    attached: dict[int, Attached] = field(default_factory=dict)
    sent: dict[int, list[float]] = field(default_factory=dict)

    def __call__(self, event):
        thread = threading.get_ident()
        if isinstance(event, Attached):
            self.attached[thread] = event
            self.sent[thread] = []
        elif isinstance(event, StepEnded):
            self.sent[thread].append(event.bytes_sent)


def normed(rank, dtype=torch.float32):
    with seeded(rank):
        inner = [nn.Linear(16, 20), nn.BatchNorm1d(20), nn.Tanh()]
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *inner, nn.Linear(20, 3)).to(dtype)


def heard_of(text, passes, world=3, model=network, optimizer=None):
    """(what rank 0 announced, bytes of each of its steps in which exchanges may have landed)"""
    recipe = resolve(text, world)
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.01)
    listener, threads = Listener(), {}

    def work(worker):
        threads[worker.rank] = threading.get_ident()
        mine = model(worker.rank, dtype=torch.float32)
        steps = optimizer(mine.parameters())
        worker.attach(mine, steps, recipe)
        for step in range(passes):
            steps.zero_grad()
            x, y = batch(step, worker.rank, dtype=torch.float32)
            nn.functional.mse_loss(mine(x), y).backward()
            steps.step()

    with subscribed(listener):
        cluster(work, world)
    return recipe, listener.attached[threads[0]], listener.sent[threads[0]]


STRATEGIES = {
    "EveryStep(accumulate=3)": 9,
    "EveryStep(delay=2)": 8,
    "LocalSGD(4)": 12,
    "PostLocalSGD(3, start=5)": 11,
    "DiLoCo(6, outer_momentum=0.5, fragments=3, delay=1)": 13,
    "DiLoCo(5, outer_momentum=0.5, fragments=2, delay=4)": 19,
    "DelayedAveraging(delay=3, period=2)": 11,
}


def check_bytes(recipe, attached, sent, world):
    said = estimate_traffic(recipe, attached, workers=world)
    assert len(sent) > 2 * said.steps
    for cycle in (sent[-said.steps :], sent[-2 * said.steps : -said.steps]):
        assert sum(cycle) == pytest.approx(said.cycle_bytes_sent, rel=1e-12)
    assert said.bytes_sent == said.cycle_bytes_sent / said.steps > 0
    return said


@pytest.mark.parametrize("compressor", ["Dense()", "Int8(block=64)", "TopK(0.05)", "PowerSGD(1)"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_forecast_is_what_sessions_send(strategy, compressor):
    recipe, attached, sent = heard_of(f"{strategy} + {compressor}", STRATEGIES[strategy])
    said = check_bytes(recipe, attached, sent, 3)
    if compressor == "Dense()" and "accumulate" not in strategy:
        whole = sum(layout.numel for _, layout in attached.layouts)
        assert (
            ring(4 * whole, 3)
            < said.cycle_bytes_sent
            < ring(4 * whole, 3) + 200 * len(recipe.strategy.steady_stage.schedule.period_rounds)
        )


@pytest.mark.parametrize(
    "text",
    [
        "EveryStep()",
        "EveryStep(delay=1) + Int8(block=64)",
        "LocalSGD(3, optimizer_state='average') + TopK(0.05)",
        "DiLoCo(6, fragments=3, delay=1, optimizer_state='average')",
        "DelayedAveraging(delay=1) + Int8(block=64)",
    ],
)
def test_the_forecast_knows_what_is_averaged_along(text):
    recipe, attached, sent = heard_of(text, 20, model=normed, optimizer=torch.optim.AdamW)
    said = check_bytes(recipe, attached, sent, 3)
    if "average" in text:
        numel = sum(layout.numel for _, layout in attached.layouts)
        statistics = 40 + 1  # with BatchNorm's count of batches
        assert other(said, "averaged along") == pytest.approx(ring(4 * (2 * numel + statistics), 3), rel=1e-12)


def partly_frozen(rank, dtype=torch.float32):
    """Frozen parameters stay here where none has moved, and the poll before a round says so of each."""
    model = normed(rank, dtype)
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("text", ["LocalSGD(3)", "DelayedAveraging(delay=1)", "EveryStep(delay=1)", "EveryStep()"])
def test_the_forecast_knows_of_frozen_parameters(text):
    recipe, attached, sent = heard_of(text, 20, model=partly_frozen)
    check_bytes(recipe, attached, sent, 3)


class Odd(nn.Module):
    """A parameter that nobody uses, a scalar, and buffers of three kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))
        for name, buffer in {"a": torch.ones(3), "b": torch.arange(4), "c": torch.ones(2, dtype=torch.float64)}.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        return self.last(self.first(x).tanh() * self.scale)


def odd(rank, dtype=torch.float32):
    with seeded(rank):
        return Odd()


@pytest.mark.parametrize("text", ["DiLoCo(4, fragments=2, optimizer_state='average')", "EveryStep(delay=1)"])
def test_the_forecast_knows_odd_models(text):
    recipe, attached, sent = heard_of(text, 13, model=odd, optimizer=torch.optim.AdamW)
    check_bytes(recipe, attached, sent, 3)


@pytest.mark.parametrize("compressor", ["Dense()", "TopK(0.05)"])
def test_the_forecast_knows_sites(compressor):
    recipe, attached, sent = heard_of(f"LocalSGD(3, per_site=2) + {compressor}", 9, world=4, model=normed)
    said = check_bytes(recipe, attached, sent, 4)
    assert other(said, "within sites") > 3 * ring(4 * attached.parameters, 2)
    assert other(said, "buffers") == 0


def test_sites_must_fit_the_world():
    recipe, attached, _ = heard_of("LocalSGD(3, per_site=2)", 1, world=4)
    with pytest.raises(AttachError, match="cannot be divided into sites of 2"):
        estimate_traffic(recipe, attached, workers=3)
    assert estimate_traffic(recipe, attached, workers=1).bytes_sent == 0
