"""Eager worker processes: they load torch's compiler when they compile, and not before."""

from __future__ import annotations

from typing import Any

import pytest
from support.paths import ROOT
from support.processes import findings, succeed

TRAIN = """
import json, sys
import torch

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3)).sum().backward()
optimizer.step()
optimizer.zero_grad()
found = {"early": "torch._dynamo.eval_frame" in sys.modules}
"""
COMPILE = """
compiled = torch.compile(model, backend="eager")
found["same"] = torch.equal(compiled(torch.ones(3)), model(torch.ones(3)))
found["frames"] = torch._dynamo.utils.counters["frames"]["ok"]
"""


def check_the_compiler_comes_when_asked_for(script: str, expected: dict[str, Any], **options: Any) -> None:
    said = succeed(["-c", script + "print('said', json.dumps(found))"], 1, **options)
    assert findings(said[0]) == [expected]


@pytest.mark.processes
def test_the_compiler_is_loaded_by_those_that_compile(request: pytest.FixtureRequest) -> None:
    """With --plain by all of them."""
    plain = request.config.getoption("plain")
    check_the_compiler_comes_when_asked_for(TRAIN + COMPILE, {"early": plain, "same": True, "frames": 1})
    other = str(ROOT / "tests" / "eager") if plain else ""
    with pytest.raises(AssertionError):
        check_the_compiler_comes_when_asked_for(TRAIN, {"early": plain}, extra={"PYTHONPATH": other})
