"""FSDP2, tensor parallelism and stages inside, recipes across: on four real workers; and what needs none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.processes import succeed
from torch import nn

from gossamer.train.sharding.local_shards import LocalModelState, WholeParameters, like, local_part, parameters_of

CHECKS = ROOT / "tests" / "support" / "sharded_checks.py"
SHARED = (
    "equals_plain_training",
    "follows_a_schedule",
    "equals_torch_hsdp",
    "accumulates_before_it_shards",
    "serves_empty_shards",
    "remembers_what_it_did_not_send",
    "averages_parameters",
    "clips_by_the_whole_norm",
    "skips_the_same_steps",
    "resumes",
    "deals_data_by_replica",
    "refuses",
)


@pytest.mark.processes
@pytest.mark.timeout(620)
def test_four_real_workers(tmp_path: Path) -> None:
    """The checks in SHARED, one after the other in the same four processes."""
    said = succeed(
        [str(CHECKS), *SHARED],
        4,
        extra={"CHECKS_FOLDER": str(tmp_path)},
        preload=["torch.distributed.fsdp", "torch.distributed.pipelining"],
        timeout_seconds=600,
    )
    for text in said:
        assert [line for line in text.splitlines() if line.startswith("passed")] == [f"passed {c}" for c in SHARED]


def test_a_whole_model_is_averaged_as_it_is() -> None:
    model = nn.Linear(2, 2)
    views = parameters_of(model)
    assert type(views) is WholeParameters
    assert views.parameters["weight"] is model.weight
    assert local_part(model.weight).data_ptr() == model.weight.data_ptr()
    part = torch.ones(2)
    assert like(part, model.bias) is part


class Counting(nn.Linear):
    def __init__(self, counted: Any) -> None:
        super().__init__(2, 2)
        self.counted = counted

    def get_extra_state(self) -> Any:
        return self.counted

    def set_extra_state(self, state: Any) -> None:
        self.counted = state


@pytest.mark.parametrize("counted", [{"batches": 7}, torch.tensor([7, 8])], ids=["dict", "tensor"])
def test_extra_state_of_a_module_is_loaded(counted: Any) -> None:
    saved, loaded = (nn.Sequential(Counting(each)) for each in (counted, None))
    LocalModelState(loaded, lambda: None).load_state_dict(LocalModelState(saved, lambda: None).state_dict())
    assert str(loaded[0].counted) == str(counted)
    assert torch.equal(loaded[0].weight, saved[0].weight)
