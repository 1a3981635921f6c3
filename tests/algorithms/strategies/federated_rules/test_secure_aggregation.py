"""SecureAggregation: bad settings are refused, and compressors either add up or are refused with a line to write."""

from __future__ import annotations

import pytest

from gossamer.algorithms.compressors import (
    Dense,
    Feedback,
    Int8,
    PowerSGD,
    RandomK,
    RandomProjection,
    Rotated,
    Route,
    TopK,
)
from gossamer.algorithms.strategies.federated_rules import SecureAggregation


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"threshold": 0.5}, "above 0.5"),
        ({"threshold": 1.01}, "above 0.5"),
        ({"neighbors": 1}, "2 or more"),
        ({"bits": 1}, "2 to 32"),
        ({"bits": 33}, "2 to 32"),
        ({"clip": 0.0}, "clip=1.0"),
        ({"clip": float("nan")}, "clip=1.0"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SecureAggregation(**fields)  # type: ignore[arg-type]


def test_its_text_rebuilds_it() -> None:
    term = SecureAggregation(threshold=0.7, neighbors=12, bits=8, clip=0.5)
    assert eval(repr(term), {"SecureAggregation": SecureAggregation}) == term


def test_linear_codes_are_taken() -> None:
    for compressor in (
        Dense(),
        RandomK(0.1),
        RandomProjection(2),
        Route(Feedback(Rotated(RandomK(0.1), by="hadamard"))),
    ):
        assert SecureAggregation().refuses(compressor) is None


def test_the_others_are_refused_with_a_line_to_write() -> None:
    others = (Int8(), TopK(0.01), Feedback(PowerSGD(2)), Dense("bfloat16"), Route(RandomK(0.1), rest=Int8()))
    for compressor in (*others, Feedback(Dense(), rule="ef21"), Feedback(Dense(), decay=0.9)):
        why = SecureAggregation().refuses(compressor)
        assert why is not None
        assert "masks cancel in a sum of integers only" in why
        assert "Write " in why or "Omit " in why
