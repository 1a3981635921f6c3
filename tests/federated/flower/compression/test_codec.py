"""Contribution codec: what is decoded and what is owed add up, and what was made for another place is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.errors import MalformedError, NotFinite, RecipeError
from gossamer.federated.flower.arrays import ArrayLayout, frame, unframe
from gossamer.federated.flower.codec import ContributionCodec, Residuals

LAYOUT = ArrayLayout.of({"w": np.zeros((24, 16), np.float32), "b": np.zeros(5, np.float32)})
SIZE = 24 * 16 + 5


def random(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", ["TopK(0.05)", "Chain(TopK(0.1), Int8())"])
def test_what_is_decoded_and_what_is_owed_add_up(recipe: str) -> None:
    codec = ContributionCodec.of(recipe, seed=3)
    residuals: Residuals = ()
    decoded, given = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(5):
        data, residuals = codec.encode(random(step), LAYOUT, residuals, node=7, step=step)
        decoded += codec.decode(data, LAYOUT, node=7, step=step)
        given += random(step)
    owed = torch.zeros(SIZE)
    owed[: 24 * 16] = next(iter(residuals[0].values()))[: 24 * 16]  # of "w"; "b" travels dense
    assert torch.allclose(decoded + owed, given, rtol=0, atol=1e-4)
    assert not torch.allclose(decoded, given, rtol=0, atol=1e-2)


def test_few_bytes_travel() -> None:
    data, _ = ContributionCodec.of("TopK(0.05)").encode(random(0), LAYOUT, (), node=0, step=0)
    assert len(data) < SIZE * 4 / 3


def test_what_belongs_elsewhere_is_refused() -> None:
    codec = ContributionCodec.of("TopK(0.05)")
    data, _ = codec.encode(random(0), LAYOUT, (), node=7, step=2)
    codec.decode(data, LAYOUT, node=7, step=2)
    other = ArrayLayout.of({"w": np.zeros((16, 24), np.float32), "b": np.zeros(5, np.float32)})
    for reader, layout, step in [
        (codec, LAYOUT, 3),
        (codec, other, 2),
        (ContributionCodec.of("TopK(0.04)"), LAYOUT, 2),
    ]:
        with pytest.raises(MalformedError, match="node 7"):
            reader.decode(data, layout, node=7, step=step)


def test_payloads_that_no_encoder_made_are_refused() -> None:
    codec = ContributionCodec.of("TopK(0.05)")
    header, payload = unframe(codec.encode(random(0), LAYOUT, (), node=7, step=2)[0])
    nan = tuple(each * torch.nan if each.is_floating_point() else each for each in payload)
    ones = tuple(torch.full_like(each, 255) if each.dtype == torch.uint8 else each for each in payload)
    for bad in (payload[:-1], payload + payload, nan, ones, tuple(each.double() for each in payload)):
        with pytest.raises(MalformedError):
            codec.decode(frame(header, bad), LAYOUT, node=7, step=2)


def test_numbers_that_are_not_finite_are_not_sent() -> None:
    with pytest.raises(NotFinite):
        ContributionCodec.of("TopK(0.05)").encode(random(0) * torch.nan, LAYOUT, (), node=7, step=2)


@pytest.mark.parametrize("recipe", ["FedAvg()", "Feedback(TopK(0.1), ef21=True)", "NoSuch()"])
def test_what_devices_cannot_send_is_refused(recipe: str) -> None:
    with pytest.raises(RecipeError):
        ContributionCodec.of(recipe)
