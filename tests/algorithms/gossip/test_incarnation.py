"""Incarnation numbers: steps of different incarnations never meet."""

from __future__ import annotations

from gossamer.algorithms.gossip.incarnation import (
    STEPS_PER_INCARNATION,
    decode_incarnation,
    encode_incarnation,
    incarnation_of,
    with_incarnation,
)


def test_steps_of_lives_never_meet() -> None:
    assert with_incarnation(0, 7) == 7
    assert with_incarnation(3, 7) == 3 * STEPS_PER_INCARNATION + 7
    assert [
        incarnation_of(with_incarnation(incarnation, step))
        for incarnation in (0, 1, 9)
        for step in (0, STEPS_PER_INCARNATION - 1)
    ] == [0, 0, 1, 1, 9, 9]
    assert [decode_incarnation(encode_incarnation(incarnation)) for incarnation in (0, 1, 12)] == [0, 1, 12]
    assert [decode_incarnation(text) for text in ("x", "-1", "1" * 10, "\u0661")] == [-1] * 4
