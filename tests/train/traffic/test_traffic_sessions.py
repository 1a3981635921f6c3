"""Traffic estimates against what sessions send, to the byte."""

import threading
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from support.expected_traffic import other, ring
from support.virtual_workers import batch, cluster, network, seeded, subscribed
from torch import nn

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError
from gossamer.events import Attached, StepEnded
from gossamer.train.traffic.traffic import estimate_traffic


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
