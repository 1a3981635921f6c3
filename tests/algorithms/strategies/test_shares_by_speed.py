"""Shares by speed: optimal, exact in sum, stable under noise, bounded for wrong reports."""

from heapq import heapreplace
from itertools import product

import numpy as np
import pytest

from gossamer.algorithms.strategies import shares_by_speed as shares_by_speed_module
from gossamer.algorithms.strategies.shares_by_speed import (
    MOST_APART,
    enough_parts,
    enough_steps,
    next_shares,
    next_steps,
    shares_by_speed,
    step_seconds,
    steps_by_speed,
    steps_until,
    used_share,
    useful_share,
)


def test_shares_follow_the_speed():
    assert shares_by_speed([1, 1, 1, 5], 16) == (5, 5, 5, 1)
    assert shares_by_speed([1.0, 0.5, 0.2], 80) == (10, 20, 50)


def test_equal_speeds_give_equal_shares():
    assert shares_by_speed([0.3] * 4, 12) == (3, 3, 3, 3)
    assert sorted(shares_by_speed([0.3] * 4, 14)) == [3, 3, 4, 4]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_shares_finish_earlier(seed):
    draw = np.random.default_rng(seed)
    seconds, parts = draw.uniform(0.1, 2.0, size=3).tolist(), int(draw.integers(3, 12))
    found = shares_by_speed(seconds, parts)
    every = [each for each in product(range(1, parts + 1), repeat=3) if sum(each) == parts]
    assert sum(found) == parts
    assert step_seconds(found, seconds) == min(step_seconds(each, seconds) for each in every)


@pytest.mark.parametrize("seed", range(20))
def test_parts_go_one_by_one_to_the_worker_that_ends_first(seed):
    draw = np.random.default_rng(seed)
    seconds = draw.choice([0.1, 0.2, 0.3, 0.7, 1.0, 5.0], size=int(draw.integers(1, 9))).tolist()
    shares = [1] * len(seconds)
    for parts in range(len(seconds), 200):
        assert shares_by_speed(seconds, parts) == tuple(shares)
        shares[min(range(len(seconds)), key=lambda rank: ((shares[rank] + 1) * seconds[rank], rank))] += 1


def test_most_parts_are_dealt_out_at_once(monkeypatch):
    """A step of a million samples has as many parts."""
    moved = []
    monkeypatch.setattr(shares_by_speed_module, "heapreplace", lambda *given: moved.append(heapreplace(*given)))
    assert sum(shares_by_speed([0.3, 0.1, 0.7, 0.2], 10**6)) == 10**6
    assert len(moved) <= 3 * 4


def test_each_worker_needs_a_part():
    with pytest.raises(ValueError, match="3 parts are too few for 4 workers"):
        shares_by_speed([1, 1, 1, 1], 3)
    with pytest.raises(ValueError, match="finite"):
        shares_by_speed([1, 0], 3)


@pytest.mark.parametrize(
    ("seconds", "period", "steps"),
    [
        ([1, 1, 1, 5], 20, (20, 20, 20, 4)),
        ([1, 1, 1, 5], 16, (16, 16, 16, 3)),
        ([1, 1, 1, 5], 8, (8, 8, 8, 1)),  # two steps would make the round 1.25 times as long
        ([1, 1, 1, 5], 4, (4, 4, 4, 1)),
        ([1.0, 1.02, 1.04], 20, (20, 20, 20)),  # noise
        ([1, 2, 4], 8, (8, 4, 2)),
    ],
)
def test_local_steps_fit_into_the_round_of_the_fastest_worker(seconds, period, steps):
    assert steps_by_speed(seconds, period) == steps


def test_used_share_is_the_part_of_time_that_workers_compute():
    assert used_share([4, 4, 4, 4], [1, 1, 1, 5]) == pytest.approx((3 * 4 + 20) / 80)
    assert used_share([5, 5, 5, 1], [1, 1, 1, 5]) == 1.0


def test_noise_of_five_percent_does_not_move_shares():
    draw = np.random.default_rng(0)
    shares = shares_by_speed([1.0, 0.5, 0.2], 80)
    for _ in range(1000):
        noisy = np.array([1.0, 0.5, 0.2]) * (1 + 0.05 * draw.uniform(-0.5, 0.5, size=3))
        assert next_shares(shares, noisy.tolist()) == shares


def test_shares_change_when_a_machine_slows_down():
    assert next_shares((4, 4, 4, 4), [1, 1, 1, 5]) == (5, 5, 5, 1)
    assert next_shares((5, 5, 5, 1), [1, 1, 1, 1]) == (4, 4, 4, 4)


def test_shares_stay_until_every_rank_has_measured():
    assert next_shares((4, 4, 4, 4), [1, 1, 0, 5]) == (4, 4, 4, 4)
    assert next_shares((4, 4, 4, 4), [1, 1, float("nan"), 5]) == (4, 4, 4, 4)


def test_a_wrong_report_is_limited():
    claimed_fast = next_shares((25, 25, 25, 25), [1, 1, 1, 1e-9])
    assert claimed_fast == shares_by_speed([1, 1, 1, 1 / MOST_APART], 100)
    assert min(claimed_fast) >= 1
    assert sum(claimed_fast) == 100
    assert next_shares((25, 25, 25, 25), [1, 1, 1, 1e9]) == shares_by_speed([1, 1, 1, MOST_APART], 100)


def test_alternating_speeds_keep_the_sum_of_a_step():
    shares = (4, 4, 4, 4)
    for step in range(100):
        shares = next_shares(shares, [1, 1, 1, 5 if step % 2 else 1])
        assert sum(shares) == 16


def test_useful_share_is_the_part_of_the_sum_of_speeds():
    assert useful_share([1, 1, 1, 1], [1, 1, 1, 5]) == pytest.approx(4 / 5 / 3.2)
    assert useful_share([10, 10, 10, 2], [1, 1, 1, 5]) == pytest.approx(1.0)
    assert useful_share([5, 5, 5], [0.1, 0.1, 0.1]) == pytest.approx(1.0)


def test_enough_parts_and_steps_leave_little_waiting_also_for_a_worker_that_hardly_computes():
    for slow in (1.0, 5.0, 20.0, 1e9):
        seconds = [1.0, 1.0, 1.0, slow]
        limited = [1.0, 1.0, 1.0, min(slow, MOST_APART)]
        assert used_share(shares_by_speed(limited, enough_parts(seconds, 4)), limited) >= 0.95
        assert used_share(steps_by_speed(limited, enough_steps(seconds, 4)), limited) >= 0.95
    assert enough_parts([1.0] * 100, 32) == 100
    assert (enough_parts([1, 1, 1, 5], 32), enough_steps([1, 1, 1, 5], 20)) == (32, 20)


def test_next_steps_stay_for_noise_and_until_every_rank_has_measured():
    assert next_steps((20, 20), [1.0, 5.0], 20) == (20, 4)
    assert next_steps((20, 4), [1.0, 4.5], 20) == (20, 4)
    assert next_steps((20, 4), [1.0, 0.0], 20) == (20, 4)


@pytest.mark.parametrize("steps", range(1, 9))
def test_steps_until_a_position_are_the_fewest_that_reach_it(steps):
    ends = [number * 8 // steps for number in range(1, 3 * steps + 1)]
    for position in range(1, 25):
        assert steps_until(position, steps, 8) == next(n + 1 for n, end in enumerate(ends) if end >= position)
