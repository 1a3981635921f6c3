"""Contribution: what was counted, what is owed, and what was clipped away, add up to what a device had to give."""

from __future__ import annotations

import pytest
import torch
from support.federations import federate
from support.seeded_bits import SeededBits
from torch import Tensor

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import LocalPrivacy
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import MismatchError, NotFinite
from gossamer.federated.client.contribution import contribution_context, encode
from gossamer.federated.client.store import ClientState
from gossamer.federated.privacy.clipping_and_noise import clip_factor, common_norm
from gossamer.train.parameter_server import shard_message

LAYOUT = Layout.of({"weight": (64, 32), "bias": (64,)})
BOUND = 8.0


def given(index: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


@pytest.mark.parametrize("text", ["TopK(0.05)", "Int8()", "PowerSGD(2)", "OneBit()", "Dense()"])
def test_counted_owed_and_clipped_add_up_to_what_was_given(text: str) -> None:
    compressor = resolve(text).compressor
    state, total = ClientState(), torch.zeros(LAYOUT.numel, dtype=torch.float64)
    counted, clipped_away = torch.zeros_like(total), torch.zeros_like(total)
    like = [FlatTensors(total, LAYOUT)]
    for index in range(8):
        at = contribution_context(3, 1, index)
        encoded = encode(compressor, LAYOUT, [given(index)], state, at)
        if index % 3 == 2:
            continue  # it was lost: everything stays as it was
        (decoded,) = shard_message.decode(compressor, encoded.payload, encoded.counts, like, at)
        factor = clip_factor(common_norm([decoded]), BOUND)
        assert factor < 1
        counted += factor * decoded
        clipped_away += (1 - factor) * decoded
        total += given(index)
        state = encoded.counted
    owed = torch.zeros_like(total)
    for key, each in state.residuals[0].items():
        if key.endswith("residual"):  # of the tensors that are not sent as they are, which come first
            owed[: len(each)] += each
    torch.testing.assert_close(counted + clipped_away + owed, total, rtol=0, atol=1e-9)
    twin = counted + owed  # what is clipped away is not owed
    assert not torch.allclose(twin, total, rtol=0, atol=1e-3)


def test_the_debt_stays_bounded_where_every_round_is_clipped() -> None:
    compressor, state = resolve("TopK(0.05)").compressor, ClientState()
    debts: list[float] = []
    twin = torch.zeros(LAYOUT.numel, dtype=torch.float64)  # that owes what is clipped away, of a wire without loss
    for index in range(80):
        state = encode(compressor, LAYOUT, [given(0)], state, contribution_context(3, 1, index)).counted
        debts += [float(each.norm()) for key, each in state.residuals[0].items() if key.endswith("residual")]
        twin += given(0)
        twin *= 1 - clip_factor(float(twin.norm()), BOUND)
    assert max(debts[40:]) < 1.5 * max(debts[20:40])
    assert float(twin.norm()) > 70 * (float(given(0).norm()) - BOUND)


def test_local_noise_stands_before_the_compressor() -> None:
    privacy = LocalPrivacy(noise=2.0, clip=3.0)
    at = contribution_context(0, 0, 0)
    encoded = encode(resolve("Dense()").compressor, LAYOUT, [given(0)], ClientState(), at, privacy, SeededBits(1))
    again = encode(resolve("Dense()").compressor, LAYOUT, [given(0)], ClientState(), at, privacy)
    noise = encoded.payload[0] - given(0) * clip_factor(float(given(0).norm()), 3.0)
    assert float(noise.std()) == pytest.approx(6.0, rel=0.1)
    assert not torch.equal(encoded.payload[0], again.payload[0])  # the system's bits are not the seed's


def test_a_device_keeps_to_its_budget_whatever_the_server_counts() -> None:
    """A server that begins anew asks again; what may have left counts, whether it was counted there or not."""
    privacy = LocalPrivacy(noise=8.0, delta=0.01, budget=3.0)
    most = next(number for number in range(1, 100) if privacy.epsilon_after(number + 1, 1, 1) > 3.0)
    assert most > 1
    state = ClientState()
    for index in range(most):
        state = encode(resolve("Dense()").compressor, LAYOUT, [given(0)], state, context(index), privacy).counted
    assert state.told == most
    with pytest.raises(MismatchError, match=rf"contribution {most + 1} .* budget of 3.* Nothing was sent"):
        encode(resolve("Dense()").compressor, LAYOUT, [given(0)], state, context(most), privacy)
    run = federate(f"FedAvg(fraction=1.0, privacy={privacy!r})", clients=3, rounds=most + 5)  # the server stops first
    assert [store.load().told for store in run.stores] == [most] * 3
    assert len(run.commits) == most


def context(index: int) -> AggregationContext:
    return contribution_context(0, 0, index)


def test_a_value_that_is_not_finite_is_not_sent() -> None:
    broken = given(0).index_fill(0, torch.tensor([5]), float("nan"))
    for privacy in (None, LocalPrivacy(noise=1.0)):
        with pytest.raises(NotFinite):
            encode(
                resolve("TopK(0.05)").compressor,
                LAYOUT,
                [broken],
                ClientState(),
                contribution_context(0, 0, 0),
                privacy,
            )
