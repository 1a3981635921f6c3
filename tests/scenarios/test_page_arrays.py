"""docs/how-to/arrays.md: its loops train, alone and with others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT
from support.virtual_workers import Worker, cluster

import gossamer
from gossamer import engine

PAGE = (ROOT / "docs" / "how-to" / "arrays.md").read_text()
LOOPS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_of_the_page_train_alone(loop: str) -> None:
    names: dict[str, object] = {}
    exec(loop, names)
    check(names["parameters"])


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_of_the_page_train_with_others(loop: str) -> None:
    def train(worker: Worker) -> None:
        def session(parameters: Any, recipe: str, **options: Any) -> engine.Session:
            return engine.Session(parameters, recipe, worker.transport, **options)

        text = re.sub(r"^import gossamer\n|^from gossamer import engine\n", "", loop, flags=re.MULTILINE)
        here = SimpleNamespace(init=lambda: SimpleNamespace(rank=worker.rank))
        names: dict[str, object] = {"engine": SimpleNamespace(Session=session), "gossamer": here}
        exec(text, names)
        check(names["parameters"])

    cluster(train, 2)


def check(parameters: object) -> None:
    assert isinstance(parameters, dict)
    np.testing.assert_allclose(parameters["weight"], np.ones((8, 1)), atol=0.05)


def test_the_page_names_all_that_the_module_has() -> None:
    assert all(f"engine.{name}" in PAGE for name in gossamer.engine.__all__)
