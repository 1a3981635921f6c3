"""Nothing waits for the host: the training thread of a model on an accelerator reads no number and copies nothing.

Counted on a device that is none (benchmarks/fake_accelerator.py), which a process registers once: so in processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fake_accelerator import DATA_SIZED, SCALAR, TO_HOST
from benchmarks.host_calls import RECIPES, HostCall, on_training_threads
from support.nightly import nightly
from support.paths import BENCHMARKS, ROOT, SUPPORT, TESTS
from support.processes import of_this_checkout

pytestmark = pytest.mark.processes


def ran(*command: str, **variables: str) -> str:
    paths = os.pathsep.join([of_this_checkout()["PYTHONPATH"], str(ROOT), str(TESTS)])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **variables, "PYTHONPATH": paths, "GOSSAMER_QUIET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FEW = ("Int8()", "TopK(density=0.1)", "LocalSGD(period=2) + Int8()", "Gossip()")


@pytest.mark.parametrize(
    ("kernels", "recipes"),
    [("", FEW), *nightly(("", RECIPES), ("reference", FEW))],
)
def test_no_recipe_makes_the_training_thread_wait(tmp_path: Path, kernels: str, recipes: tuple[str, ...]) -> None:
    file = tmp_path / "calls.json"
    wanted = [word for recipe in recipes for word in ("--recipe", recipe)]
    table = ran(str(BENCHMARKS / "host_calls.py"), "--json", str(file), *wanted, GOSSAMER_KERNELS=kernels)
    counted = {recipe: [HostCall(**call) for call in calls] for recipe, calls in json.loads(file.read_text()).items()}
    assert tuple(counted) == recipes
    for recipe, calls in counted.items():
        assert on_training_threads(calls) == [], recipe
        assert calls, f"{recipe}: nothing was counted on the communication thread, which reads its peers' reports"
        assert f"| `{recipe}` | 0 | 0 | 0 | 0 |" in table


@pytest.fixture(scope="module")
def twins() -> dict[str, Any]:
    return json.loads(ran(str(SUPPORT / "host_call_twins.py")))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("twin", "kind", "thread"),
    [
        ("hook", SCALAR, "Dummy"),  # autograd's thread of the device, which Python did not start
        ("index", DATA_SIZED, "Dummy"),
        ("step", TO_HOST, "rank-0"),  # the loop's own
    ],
)
def test_a_wait_is_seen_in_whichever_training_thread(twins: dict[str, Any], twin: str, kind: str, thread: str) -> None:
    seen = twins[twin]["training"]
    assert any(how == kind and where.startswith(thread) for how, where in seen), seen


def test_an_encoder_waits_on_the_communication_thread_alone(twins: dict[str, Any]) -> None:
    assert twins["encoder"]["training"] == []
    assert twins["encoder"]["communication"] > 0


def test_the_worker_on_the_device_has_the_bits_of_the_one_on_the_cpu(twins: dict[str, Any]) -> None:
    """So what is counted is a training that works."""
    for recipe, (first, second) in twins["parameters"].items():
        assert first == second, recipe
