"""What a few steps of a script tell before it is profiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.plan.advise.advisor import check_script, difference, statistics_remarks
from gossamer.plan.advise.race import RaceError
from gossamer.plan.profile.gradient_statistics import GradientObserver

SCRIPT = """
import torch
from torch import nn
import gossamer

world = gossamer.init()
{seed}
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(world.rank)
with gossamer.attach(model, optimizer) as session:
    for step in range({steps}):
        loss = model(torch.randn(16, 8, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {log}
"""
SEED, LOG = "torch.manual_seed(0)", "session.log(loss=loss.item())"


def _script(folder: Path, seed: str = SEED, log: str = LOG, steps: int = 50) -> Path:
    (folder / "train.py").write_text(SCRIPT.format(seed=seed, log=log, steps=steps))
    return folder / "train.py"


def test_a_script_that_repeats_itself(tmp_path: Path) -> None:
    facts = check_script(_script(tmp_path), (), 2)
    assert facts.remark is None
    assert facts.model.parameters == 36
    assert facts.optimizer_type.__name__ == "SGD"
    assert facts.step_seconds > 0
    assert facts.batch == 16


def test_a_script_without_a_seed_is_reported(tmp_path: Path) -> None:
    remark = check_script(_script(tmp_path, seed="torch.seed()"), (), 2).remark
    assert remark is not None
    assert "unseeded random numbers" in remark
    assert "torch.manual_seed(0)" in remark


def test_without_a_loss_it_explains_how_to_log_one(tmp_path: Path) -> None:
    with pytest.raises(RaceError, match=r"session\.log\(loss=loss\.item\(\)\)"):
        check_script(_script(tmp_path, log="pass"), (), 2)


def test_a_target_may_be_all_that_is_logged(tmp_path: Path) -> None:
    script = _script(tmp_path, log="session.log(error=1.0)")
    assert check_script(script, (), 2, "error").remark is None


def test_a_loss_that_is_not_a_number_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RaceError, match=r"fails with Dense.*loss is nan"):
        check_script(_script(tmp_path, log="session.log(loss=float('nan'))"), (), 2)


def test_a_script_that_makes_no_step(tmp_path: Path) -> None:
    with pytest.raises(RaceError, match="made no optimizer step"):
        check_script(_script(tmp_path, steps=0), (), 2)


@pytest.mark.parametrize(
    ("skipped", "says"), [(None, "there are no gradient statistics"), (0, ""), (3, "leave out 3 of 5 batches")]
)
def test_an_advice_reports_gradients_that_are_not_finite(skipped: int | None, says: str) -> None:
    """skipped: batches without finite gradients, of some; None if no batch has them."""
    observer = GradientObserver(skipped_batches=skipped or 0)
    for _ in range(2):
        observer.observe({"weight": torch.ones(4)})
    statistics = None if skipped is None else observer.statistics()
    assert says in " ".join(statistics_remarks(statistics))
    assert bool(says) == bool(list(statistics_remarks(statistics)))


def test_differences() -> None:
    same = {"loss": [(1, 1.0, 2.0), (2, 2.0, 1.0)]}
    assert difference(same, same) is None
    assert difference(same, {"loss": [(1, 9.0, 2.0), (2, 9.0, 1.00001)]}) is None
    assert "1 and 1.1 in step 2" in str(difference(same, {"loss": [(1, 1.0, 2.0), (2, 2.0, 1.1)]}))
