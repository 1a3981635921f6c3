"""Eager worker processes: they load torch's compiler when they compile, its algebra for symbols, and neither before."""

from __future__ import annotations

from typing import Any

import pytest
from support.paths import ROOT
from support.processes import findings, succeed

from gossamer.algorithms.compressors import PowerSGD, SparseSum, TopK
from gossamer.algorithms.recipes.wrapping import bytes_sent

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
PRICE = """
import json, sys
import gossamer
from gossamer.algorithms.recipes.wrapping import bytes_sent
from gossamer.algorithms.compressors import PowerSGD, SparseSum, TopK

ways = [TopK(density=0.01), SparseSum(TopK(density=0.01)), PowerSGD(rank=2)]
found = {"bytes": [bytes_sent(way, 4) for way in ways], "early": hasattr(sys.modules.get("sympy"), "__file__")}
"""
SYMBOLS = """
from torch.fx.experimental.symbolic_shapes import ShapeEnv, expect_true, guard_or_false, sym_eq
import torch
import torch.fx.experimental.symbolic_shapes as shapes
import sympy

size = ShapeEnv().create_unbacked_symint()
found["symbols"] = [
    guard_or_false(size == 3), expect_true(size == 4), guard_or_false(size == 4), bool(sym_eq((size, 2), (4, 2))),
    isinstance(sympy.Symbol("n"), sympy.Basic), shapes is torch.fx.experimental.symbolic_shapes,
]
"""


def check_the_compiler_comes_when_asked_for(script: str, expected: dict[str, Any], **options: Any) -> None:
    said = succeed(["-c", script + "print('said', json.dumps(found))"], 1, **options)
    assert findings(said[0]) == [expected]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.new_programs
def test_the_compiler_is_loaded_by_those_that_compile(request: pytest.FixtureRequest) -> None:
    """With --plain by all of them."""
    plain = request.config.getoption("plain")
    check_the_compiler_comes_when_asked_for(TRAIN + COMPILE, {"early": plain, "same": True, "frames": 1})
    other = str(ROOT / "tests" / "eager") if plain else ""
    with pytest.raises(AssertionError):
        check_the_compiler_comes_when_asked_for(TRAIN, {"early": plain}, extra={"PYTHONPATH": other})


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.new_programs
def test_recipes_are_priced_without_algebra_and_symbols_bring_it(request: pytest.FixtureRequest) -> None:
    plain = request.config.getoption("plain")
    ways = [TopK(density=0.01), SparseSum(TopK(density=0.01)), PowerSGD(rank=2)]
    expected = {"bytes": [bytes_sent(way, 4) for way in ways], "early": plain}
    symbols = {"symbols": [False, True, True, True, True, True]}
    check_the_compiler_comes_when_asked_for(PRICE + SYMBOLS, expected | symbols)
    other = str(ROOT / "tests" / "eager") if plain else ""
    with pytest.raises(AssertionError):
        check_the_compiler_comes_when_asked_for(PRICE, expected, extra={"PYTHONPATH": f"{other}:{ROOT / 'src'}"})
