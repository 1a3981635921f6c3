"""What is estimated of a round, against rounds that are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.federations import federate, model_of

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import FedAvg, Privacy
from gossamer.base.layout import Layout
from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import Peer
from gossamer.base.rng import generator
from gossamer.federated.messages import CLIENT, THE_SERVER
from gossamer.federated.model_state import ModelState
from gossamer.federated.round_forecast import RoundForecast, forecast_round, mean_pulled

LAYOUT = Layout.of({"weight": (1000, 100), "bias": (100,)})
DENSE = 4 * LAYOUT.numel


def estimated(recipe: Any, clients: int = 100, **options: Any) -> RoundForecast:
    return forecast_round(resolve(recipe), LAYOUT, torch.float32, clients, **options)


def test_dense_rounds_send_everything_both_ways() -> None:
    found = estimated("FedAvg(fraction=0.1)")
    assert (found.cohort, found.clients) == (10, 100)
    assert found.up_bytes == found.down_bytes == found.whole_bytes == DENSE
    assert found.server_up_bytes == found.server_down_bytes == 10 * DENSE
    assert found.dense_bytes == 2 * DENSE
    assert found.device_bytes == DENSE
    assert found.server_bytes == 3 * DENSE  # parameters, what is published, and a sum


def test_compression_variates_and_kept_contributions_are_counted() -> None:
    plain, codec = estimated("FedAvg() + Int8()"), estimated("SCAFFOLD(pull=Int8()) + Int8()")
    assert plain.up_bytes < 0.3 * DENSE
    assert codec.up_bytes == 2 * plain.up_bytes
    assert codec.link_bytes == codec.up_bytes
    assert codec.whole_bytes == 2 * DENSE
    assert codec.residual_bytes == 2 * plain.residual_bytes == 8 * 100_000  # biases are sent as they are
    assert codec.device_bytes == 2 * DENSE + codec.residual_bytes + DENSE
    assert estimated("FedAvg(aggregator=Median())").server_bytes == (1 + 10 + 1) * DENSE
    assert estimated("FedOpt('adam')").server_bytes == (1 + 1 + 2 + 1) * DENSE
    assert estimated("FedBuff(buffer=25)").cohort == 25


def test_what_travels_in_a_federation_is_what_was_estimated() -> None:
    """Payload bytes of dense messages exactly; text beside them is all that is not counted."""
    clients, rounds = 4, 3
    run = federate("SCAFFOLD(fraction=1.0)", clients=clients, rounds=rounds)
    state = ModelState.of(model_of())
    found = forecast_round(resolve("SCAFFOLD(fraction=1.0)"), state.layout, state.dtype, clients)
    snapshot = run.rounds.model.pulled_since(-1)
    assert payload_bytes(snapshot.payload) == found.whole_bytes == found.down_bytes
    sent = run.trace.sent_bytes[Peer(CLIENT, 0), THE_SERVER]
    assert rounds * found.up_bytes <= sent < rounds * (found.up_bytes + 2000)


def waited(whole: int, link: int, chance: float, draws: int = 200_000) -> float:
    """The mean of as many waits by coins."""
    gaps = torch.empty(draws, dtype=torch.float64).geometric_(chance, generator=generator("waits"))
    costs = gaps * link
    return float(torch.where(costs < whole, costs, torch.tensor(float(whole)).double()).mean())


@pytest.mark.parametrize(
    ("whole", "link", "chance"), [(1000, 30, 0.1), (1000, 250, 0.1), (1000, 999, 0.5), (90, 1, 0.01)]
)
def test_what_a_device_pulls_is_the_mean_over_its_waits(whole: int, link: int, chance: float) -> None:
    found = mean_pulled(whole, link, chance)
    assert found == pytest.approx(waited(whole, link, chance), rel=0.01)
    assert found != pytest.approx(waited(whole, link, chance / 2), rel=0.01) or link == 999


def test_ends_of_the_range() -> None:
    assert mean_pulled(1000, None, 0.1) == 1000
    assert mean_pulled(1000, 10, 1.0) == 10
    assert mean_pulled(1000, 2000, 0.1) == 1000
    assert mean_pulled(1000, 0, 0.1) == 0


def test_masks_make_a_number_as_wide_as_the_sum() -> None:
    found = estimated("FedAvg(secure=SecureAggregation(bits=16))", clients=1000)
    assert found.up_bytes == -(-LAYOUT.numel * (16 + 7) // 8)  # of 100 devices
    assert found.masks


@dataclass(frozen=True, repr=False)
class Costly(Privacy):
    """A privacy whose epsilon shows what it was asked."""

    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        return rounds * cohort / clients * (2 if feedback else 1)

    def check(self, *_: object) -> None:
        """Anything goes together with it."""


def test_the_privacy_of_a_plan_is_estimated() -> None:
    make: Any = Costly
    private = FedAvg(fraction=0.2, privacy=make(**({"noise": 1.0} if "noise" in Costly.__dataclass_fields__ else {})))
    assert estimated(private).epsilon == ((10, 2.0), (100, 20.0), (1000, 200.0))
    assert estimated(private + resolve("TopK(0.1)").compressor).epsilon[0] == (10, 4.0)
    assert estimated("FedAvg()").epsilon == ()
