"""What a boundary takes and refuses, and what it costs."""

import pytest
import torch
from support.virtual_workers import heard

from gossamer import events
from gossamer.algorithms.compressors import Int8
from gossamer.errors import RecipeError
from gossamer.train.parallel import boundary

SHAPE = (4, 8, 32)
FIT = ["Dense()", "Dense('bfloat16')", "Int8()", "Int8(stochastic=True)", "Float4()", "TopK(0.1)", "Threshold(0.1)"]
FIT += ["OneBit()", "TwoBit()", "QSGD(7)", "SignMagnitude()", "Chain(TopK(0.1), Int8())", "Rotated(Int8())"]


@pytest.mark.parametrize("codec", FIT)
def test_codecs_of_one_size_are_taken(codec: str) -> None:
    edge = boundary(codec, shape=SHAPE)
    carrier = edge.carrier()
    assert carrier.is_meta
    assert carrier.requires_grad  # or torch would send no gradient back
    assert carrier.shape == (edge.format.numel,)


def test_a_boundary_needs_no_session_and_reports_it() -> None:
    with heard(events.WithoutSession) as told:
        boundary("Int8()", shape=SHAPE)
    assert [event.trains for event in told] == [True]


def test_carriers_are_as_small_as_their_codec() -> None:
    """Five int64 before N bytes and a scale for each 256 of them; sixteen times fewer than float32, and those five."""
    assert boundary("Int8()", shape=SHAPE).carrier().numel() * 4 == 40 + 1024 + 4 * 4
    assert boundary("OneBit()", shape=SHAPE).carrier().numel() * 4 < 40 + 1024 * 4 / 16
    assert boundary("Dense()", shape=SHAPE, dtype=torch.bfloat16).carrier().numel() * 4 == 40 + 1024 * 2


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        ("Adaptive(TopK(0.1))", "change their size"),
        ("Warmup(TopK(0.1))", "change their size"),
        ("Feedback(Int8())", "keeps state by sample"),
        ("Sharded(Int8())", "one sender and one receiver"),
        ("PowerSGD(2)", "one sender and one receiver"),
        ("DGC(0.1)", "one sender and one receiver"),
        ("Int8() + LocalSGD(8)", "no strategy"),
        ("LocalSGD(8)", "no strategy"),
        ("home", "no strategy"),
    ],
)
def test_what_cannot_stand_between_two_stages_is_refused(codec: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        boundary(codec, shape=SHAPE)


def test_differences_need_a_codec_that_comes_closer() -> None:
    boundary("QSGD(1, block=16)", shape=SHAPE)  # right on average, and that is enough without memory
    with pytest.raises(RecipeError, match="diverge"):
        boundary("QSGD(1, block=16)", shape=SHAPE, feedback="difference", samples=9)
    with pytest.raises(RecipeError, match="lossless"):
        boundary("Dense()", shape=SHAPE, feedback="difference", samples=9)


@pytest.mark.parametrize(
    "options",
    [
        {"shape": ()},
        {"shape": (0, 8)},
        {"shape": SHAPE, "dtype": torch.int64},
        {"shape": SHAPE, "feedback": "classic", "samples": 9},
        {"shape": SHAPE, "feedback": "difference"},
        {"shape": SHAPE, "feedback": "difference", "samples": -1},
        {"shape": SHAPE, "samples": 9},
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"Write|Example: shape="):
        boundary("Int8()", **options)  # type: ignore[arg-type]


def test_memory_is_told_before_it_is_taken() -> None:
    edge = boundary("Int8()", shape=(4, 8, 32), dtype=torch.bfloat16, feedback="difference", samples=1000)
    assert edge.memory_bytes == 1000 * (8 * 32 * 2 + 8)
    assert boundary("Int8()", shape=(4, 8, 32)).memory_bytes == 0


def test_all_that_both_sides_must_have_alike_is_in_the_fingerprint() -> None:
    edges = [
        boundary(Int8(), shape=SHAPE),
        boundary("Int8(block=128)", shape=SHAPE),
        boundary("Int8()", shape=(8, 8, 32)),
        boundary("Int8()", shape=SHAPE, dtype=torch.bfloat16),
        boundary("Int8()", shape=SHAPE, feedback="difference", samples=9),
        boundary("Int8()", shape=SHAPE, feedback="difference", samples=10),
    ]
    assert len({edge.fingerprint for edge in edges}) == len(edges)
    assert boundary("Int8()", shape=list(SHAPE)).fingerprint == edges[0].fingerprint
