"""docs/arrays.md: its loop trains, alone and with others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.paths import ROOT
from support.virtual_workers import Worker, cluster

import gossamer
from gossamer import engine

PAGE = (ROOT / "docs" / "arrays.md").read_text()
LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]


def test_the_loop_of_the_page_trains_alone() -> None:
    names: dict[str, object] = {}
    exec(LOOP, names)
    check(names["parameters"])


def test_the_loop_of_the_page_trains_with_others() -> None:
    def train(worker: Worker) -> None:
        def session(parameters: Any, recipe: str) -> engine.Session:
            return engine.Session(parameters, recipe, worker.transport)

        text = re.sub(r"^import gossamer\n|^from gossamer import engine\n", "", LOOP, flags=re.MULTILINE)
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
