"""Step reports: what follows from the positions of all ranks in their data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.errors import MismatchError
from gossamer.train.engine.step_decision import (
    LAPS,
    SHORT_OF_MEMORY,
    Presence,
    StepDecision,
    StepReport,
    compare_settings,
    decide,
    encode,
    settings,
)

NO_FLAGS = np.zeros(0, dtype=bool)


def report(lap: int, presence: Presence = Presence.TRAINING, **options: bool) -> StepReport:
    return StepReport(
        weight=1.0, presence=presence, settings=0, steps=0, used=NO_FLAGS, moved=NO_FLAGS, lap=lap, **options
    )


def decided(*reports: StepReport) -> StepDecision:
    return decide(list(map(encode, reports)), reports[0])


@pytest.mark.parametrize(
    ("laps", "ahead"),
    [
        ((4, 5, 4), {}),
        ((63, 0, 62), {}),
        ((4, 6, 4), {0: 0.0, 1: 1.0, 2: 0.0}),
        ((6, 4, 5), {0: 0.0, 1: -1.0, 2: -0.5}),
        ((63, 1, 63), {0: 0.0, 1: 1.0, 2: 0.0}),
        ((0, 0, 62), {0: 0.0, 1: 0.0, 2: -1.0}),
    ],
)
def test_ranks_more_than_half_an_epoch_apart_are_found_also_where_the_count_begins_again(
    laps: tuple[int, ...], ahead: dict[int, float]
) -> None:
    assert decided(*map(report, laps)).apart_in_data == ahead


def test_ranks_without_data_are_not_compared() -> None:
    assert decided(report(4), report(20, Presence.OUT_OF_DATA)).apart_in_data == {}


@pytest.mark.parametrize("lap", [0, 1, LAPS - 1, LAPS, 5 * LAPS + 7])
@pytest.mark.parametrize("wishes", [{}, {"stop": True}, {"look": True}, {"stop": True, "look": True}])
def test_a_lap_travels_next_to_the_wishes(lap: int, wishes: dict[str, bool]) -> None:
    decision = decided(report(lap, **wishes), report(lap % LAPS), report(lap + 3))
    assert decision.apart_in_data == {0: 0.0, 1: 0.0, 2: 1.5}
    assert (decision.stop, decision.look) == (wishes.get("stop", False), wishes.get("look", False))


def flags(*values: int) -> np.ndarray:
    return np.array(values, dtype=bool)


def told(**options: object) -> StepReport:
    about = {"weight": 1.0, "presence": Presence.TRAINING, "settings": 7, "steps": 3, "sample": 5}
    return StepReport(**{**about, "used": flags(*[0] * 9), "moved": flags(0, 0), **options})  # type: ignore[arg-type]


def test_every_field_of_a_decision_follows_from_all_reports() -> None:
    used = [flags(1, *[0] * 8), flags(*[0] * 8, 1), flags(*[0] * 9)]
    decision = decided(
        told(weight=0.1, used=used[0]),
        told(weight=0.2, used=used[1], moved=flags(0, 1), first_nonfinite=4),
        told(weight=0.0, presence=Presence.OUT_OF_DATA, steps=0, settings=0, sample=0, used=used[2]),
    )
    assert decision.weight == 0.1 + 0.2
    assert (decision.active, decision.all_trained) == ((0, 1), False)
    assert decision.presences == (Presence.TRAINING, Presence.TRAINING, Presence.OUT_OF_DATA)
    assert (decision.nonfinite, decision.short) == (((1, 4),), False)
    assert (decision.alike, decision.in_step, decision.parted) == (True, True, ())
    assert decision.steps == {0: 3, 1: 3}
    assert decision.used.tolist() == [True, *[False] * 7, True]
    assert decision.moved.tolist() == [False, True]


def test_ranks_that_differ_are_found_in_the_decision() -> None:
    assert decided(told(), told(sample=6)).parted == (0, 1)
    assert not decided(told(), told(settings=8)).alike
    apart = decided(told(), told(steps=4, sample=6))
    assert (apart.in_step, apart.parted) == (False, ())
    assert decided(told(), told(first_nonfinite=SHORT_OF_MEMORY)).short


def test_no_rank_with_data_is_a_decision_too() -> None:
    decision = decided(*[told(weight=0.0, presence=Presence.ENDING) for _ in range(2)])
    assert (decision.active, decision.steps, decision.in_step, decision.weight) == ((), {}, True, 0.0)


def test_a_report_without_flags_is_decoded() -> None:
    decision = decided(report(0), report(0))
    assert (decision.used.tolist(), decision.moved.tolist()) == ([], [])


def test_tensors_of_an_optimizer_that_are_no_settings_are_not_compared() -> None:
    groups = [{"params": [torch.zeros(1)], "buffer": torch.ones(3), "lr": torch.tensor([0.5])}]
    text = settings(torch.optim.SGD(groups), weighted=False)
    assert "lr=0.5" in text
    assert "buffer" not in text


def test_settings_differ_by_hyperparameters_loss_scale_and_batch_weights() -> None:
    def optimizer(rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=rate)

    texts = [
        settings(optimizer(0.1), weighted=False),
        settings(optimizer(0.2), weighted=False),
        settings(optimizer(0.1), 1024.0, weighted=False),
        settings(optimizer(0.1), weighted=True),
        settings(None, weighted=False),
        settings(None, weighted=True),
    ]
    assert len(set(texts)) == len(texts)
    assert settings(optimizer(0.1), weighted=False) == texts[0]
    with pytest.raises(MismatchError, match="only some ranks have set a batch weight"):
        compare_settings([texts[0], texts[3]])
    with pytest.raises(MismatchError, match=r"lr=0\.1.*on rank 0, .*lr=0\.2.*on rank 1"):
        compare_settings([texts[0], texts[1]])
