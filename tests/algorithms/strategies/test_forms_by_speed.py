"""Use of the workers' speeds by a strategy, and the sentence that proposes others."""

from __future__ import annotations

import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.forms_by_speed import forms_by_speed, proposal, speed_use

SLOW = [1.0, 1.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("recipe", "use"),
    [
        ("Dense()", 0.25),
        ("EveryStep(accumulate=4)", 0.25),
        ("EveryStep(global_batch=32, batch=2)", 0.25),
        ("EveryStep(global_batch=256, batch=8, balance=True)", 1.0),
        ("EveryStep(global_batch=16, batch=4, balance=True)", 0.25),  # 4 passes: one each
        ("EveryStep(global_batch=32, balance=True)", 1.0),
        ("LocalSGD(20)", 0.25),
        ("LocalSGD(20, balance=True)", 1.0),
        ("DiLoCo(16, balance=True)", (3 * 16 + 3) / 16 / 3.2),
        ("DelayedAveraging(delay=2)", 0.25),
        ("PostLocalSGD(4, start=10)", 0.25),
        ("Gossip() + Ring()", 0.25),
        ("Gossip('pairwise')", 1.0),
        ("ParameterServer('sync')", 0.25),
        ("ParameterServer('sync', backup=1)", 3 / 3.2),
        ("ParameterServer('stale', staleness=4)", 0.25),
        ("ParameterServer('async')", 1.0),
        ("AsyncDiLoCo(24)", 1.0),
        ("Silent()", 1.0),
    ],
)
def test_use_of_speeds_by_hand(recipe: str, use: float) -> None:
    assert speed_use(resolve(recipe, 4).strategy, SLOW) == pytest.approx(use)
    assert speed_use(resolve(recipe, 4).strategy, [0.1] * 4) == pytest.approx(0.75 if "backup" in recipe else 1.0)


@pytest.mark.parametrize("backup", [3, 4, 9])
def test_a_round_awaits_a_worker_however_many_may_be_late(backup: int) -> None:
    """As servers do, which end a round with its first gradient."""
    strategy = resolve(f"ParameterServer('sync', backup={backup})", 4).strategy
    assert speed_use(strategy, [2.0, 1.0, 1.0, 5.0]) == pytest.approx(1 / 2.7)
    assert speed_use(strategy, [2.0]) == 1.0


@pytest.mark.parametrize("seconds", [SLOW, [1, 1 / 0.7, 2, 5], [1, 2, 4, 4], [1.0] * 200 + [3.0], [1, 1, 1, 30.0]])
def test_proposed_forms_use_nearly_all(seconds: list[float]) -> None:
    assert all(use >= 0.95 for use in forms_by_speed(seconds).values())


def test_the_proposal_names_forms_with_their_use() -> None:
    text = proposal(SLOW)
    assert "equal shares use 0.25 of what these ranks can compute" in text
    for strategy, use in forms_by_speed(SLOW).items():
        assert repr(strategy) in text
        assert f"{use:.2f}" in text
