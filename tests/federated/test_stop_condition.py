"""Stop condition: read from text; reached by a metric that is told and good enough, and by nothing else."""

from __future__ import annotations

import pytest

from gossamer.federated.evaluation import StopCondition


@pytest.mark.parametrize(("text", "value", "ends"), [("a>0.5", 0.6, True), (" a <= 1e-3", 0.6, False)])
def test_a_stop_condition_is_read(text: str, value: float, ends: bool) -> None:
    assert StopCondition.read(text).reached({"a": value}) is ends
    assert not StopCondition.read(text).reached({"b": value})
    assert not StopCondition.read(text).reached({"a": float("nan")})
    with pytest.raises(ValueError, match=r"write accuracy>0\.95"):
        StopCondition.read(text + "x")
