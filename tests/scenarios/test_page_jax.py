"""docs/how-to/integrations/jax.md: its loops train, and the examples that it names run."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.jax_training import jax, jnp
from support.paths import ROOT
from support.virtual_workers import Worker, cluster

import gossamer.jax

PAGE = (ROOT / "docs" / "how-to" / "integrations" / "jax.md").read_text()
BETWEEN, WITHIN, ELASTIC, ORDERED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_loops_of_the_page_train_with_others() -> None:
    known: dict[int, dict[str, Any]] = {0: {}, 1: {}}

    def train(worker: Worker, text: str) -> Any:
        def session(parameters: Any, recipe: str, **options: Any) -> Any:
            return gossamer.jax.Session(parameters, recipe, worker.transport, **options)

        def optimizer(inner: Any, recipe: str) -> Any:
            return gossamer.jax.optimizer(inner, recipe, transport=worker.transport)

        door = SimpleNamespace(Session=session, optimizer=optimizer)
        here = SimpleNamespace(init=lambda: SimpleNamespace(rank=worker.rank), jax=door)
        names = known[worker.rank]
        names["gossamer"] = here
        with jax.default_device(jax.devices()[worker.rank]):
            exec(re.sub(r"^import gossamer.*\n", "", text, flags=re.MULTILINE), names)
            return jax.device_get(names["parameters"]["weight"])

    for text in (BETWEEN, WITHIN, ELASTIC):  # each goes on from the one before
        for weight in cluster(partial(train, text=text), 2):
            np.testing.assert_allclose(weight, np.ones((8, 1)), atol=0.3)


def test_the_tree_of_the_page_has_the_names_of_a_torch_model() -> None:
    names: dict[str, Any] = {"jnp": jnp}
    exec(ORDERED, names)
    assert [*names["parameters"]] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("command", [("jax_flax.py", "--epochs", "2"), ("jax_equinox.py", "--steps", "40")])
@pytest.mark.processes
@pytest.mark.new_programs
def test_the_examples_learn(command: tuple[str, ...]) -> None:
    pytest.importorskip(command[0].removeprefix("jax_").removesuffix(".py"))
    run = [sys.executable, str(ROOT / "examples" / command[0]), *command[1:]]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    right = [float(each) for each in re.findall(r"([\d.]+)% of 297", done.stdout)]
    assert right[-1] > 60
