"""Loss guard: warm-ups, moving gradients and what waits are seen; a steady run is let go."""

import pytest

from gossamer.train.auto.loss_guard import moves, remember, residual_gradients, warms_up
from gossamer.train.auto.measurement import Measurement


def norms(law, looks, apart=5):
    kept = ()
    for look in range(looks):
        kept = remember(kept, look * apart, law(look * apart))
    return kept


def test_at_the_beginning_nobody_knows() -> None:
    assert moves(norms(lambda step: 1.0, 5))
    assert moves(norms(lambda step: 1.0, 20))  # 95 steps
    assert not moves(norms(lambda step: 1.0, 21))


@pytest.mark.parametrize(("late", "said"), [(1.4, False), (1.6, True), (0.6, False), (0.4, True)])
def test_half_is_the_bound(late: float, said: bool) -> None:
    assert moves(norms(lambda step: 1.0 if step < 100 else late, 31)) == said


def test_the_mutant_that_never_forgets_sees_a_fall_of_long_ago() -> None:
    def fallen(step: int) -> float:
        return 100.0 if step < 50 else 1.0

    assert not moves(norms(fallen, 60))
    assert moves(tuple((5 * look, fallen(5 * look)) for look in range(20)) + ((100, 1.0),))


@pytest.mark.parametrize("apart", [1, 5, 64, 1000])
def test_few_numbers_are_kept_however_far_looks_are_apart(apart: int) -> None:
    kept = norms(lambda step: 1.0, 500, apart)
    assert len(kept) <= 102
    assert not moves(kept)


def test_norms_that_are_not_told_move_nothing() -> None:
    assert not moves(norms(lambda step: None, 10))


def test_a_rising_rate_is_a_warm_up() -> None:
    def told(rate: float | None) -> list[Measurement]:
        return [Measurement(learning_rate=rate)] * 2

    assert warms_up(told(0.2), 0.1)
    assert not warms_up(told(0.1), 0.1)
    assert not warms_up(told(0.05), 0.1)
    assert not warms_up(told(0.2), None)
    assert not warms_up(told(None), 0.1)


def test_what_waits_is_counted_in_gradients_where_most_does() -> None:
    ranks = [Measurement(gradient_norm=2.0, residual_norm=each) for each in (1.0, 30.0, 4.0)]
    assert residual_gradients(ranks) == 15.0
    assert residual_gradients([Measurement(gradient_norm=2.0)]) is None
    assert residual_gradients([Measurement(gradient_norm=0.0, residual_norm=1.0)]) is None
