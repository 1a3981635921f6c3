"""gossamer.tensorflow: tapes, optimizers and broadcasts, and the strategies of tf.distribute on the same batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.keras_results import Results, results_of
from support.keras_torch import torch_run
from support.processes import free_port, of_this_checkout

pytestmark = [pytest.mark.processes, pytest.mark.new_programs, pytest.mark.timeout(600)]


@pytest.fixture
def result() -> Results:
    return results_of("tensorflow")


def test_a_tape_averages_with_the_bits_and_bytes_of_torch(result: Results) -> None:
    expected, count = torch_run("Dense()", "linear", 3)
    assert result["tape"]["dense"] == [[expected, expected], count]


def test_a_tape_sends_the_bytes_of_torch_under_topk(result: Results) -> None:
    expected, count = torch_run("TopK(0.1)", "network", 6)
    (first, second), sent = result["tape"]["topk"]
    assert sent == count
    assert first == second
    for one, other in zip(first, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_a_batch_that_is_not_finite_gives_zeros_on_all_ranks(result: Results) -> None:
    found = result["tape_non_finite"]
    assert found["spoilt"] == found["before"]


def test_a_distributed_optimizer_steps_in_a_loop_with_apply_gradients(result: Results) -> None:
    expected, count = torch_run("DiLoCo(period=3) + Float4()", "network", 6)
    found = result["distributed_optimizer"]
    assert found["bytes"] == count
    assert found["ranks"][0] == found["ranks"][1]
    for one, other in zip(found["ranks"][0], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_broadcast_variables_assigns_the_values_of_the_root(result: Results) -> None:
    assert result["broadcast"] == [[["bfloat16", "int32", "float32"], [2.5, 7.0, 1.0]]] * 2


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("LocalSGD(period=2)", "AttachError", "DistributedOptimizer"),
        ("EveryStep(accumulate=2)", "AttachError", "DistributedOptimizer"),
        ("ParameterServer('sync')", "AttachError", "DistributedOptimizer"),
        ("compiled", "AttachError", "@tf.function without jit_compile=True"),
        ("strategy", "AttachError", "gossamer run --workers 4"),
        ("elastic", "AttachError", "gossamer.tensorflow.DistributedOptimizer"),
        ("other variables", "LayoutError", "rank 0"),
        ("other recipe", "AttachError", "the same recipe"),
    ],
)
def test_uses_of_a_tape_that_cannot_be_averaged_are_refused(result: Results, name: str, kind: str, words: str) -> None:
    found, message = result["tape_refused"][name]
    assert found == kind, message
    assert words in message


def test_the_example_of_the_page_learns(result: Results) -> None:
    assert result["tensorflow_page"][-1] < result["tensorflow_page"][0]


# -- the strategies of tf.distribute -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "recipe"), [("MirroredStrategy", "EveryStep()"), ("CentralStorageStrategy", "local")]
)
def test_the_recipe_of_a_strategy_has_its_bits(result: Results, strategy: str, recipe: str) -> None:
    found = result["strategies"]
    assert found[recipe] == [found[strategy]] * 2


def test_the_recipe_of_parameter_server_strategy_steps_with_each_push(result: Results) -> None:
    """Which push comes first depends on the threads, so only the result of all of them is compared with the mean's."""
    found = np.array(result["strategies"]["dist_async"])
    assert np.isfinite(found).all()
    assert result["strategies"]["dist_async"] != result["strategies"]["local"]


JOINS = """
import numpy as np
import gossamer
from gossamer import engine

world = gossamer.init()
with engine.Session({"w": np.zeros(2)}, "EveryStep()") as session:
    mean = session.give({"w": np.full(2, world.rank + 1.0)})
    session.took_step({"w": mean["w"]})
print(world.rank, world.size, mean["w"].tolist(), flush=True)
"""


def test_the_workers_of_a_tf_config_train_together(tmp_path: Path) -> None:
    """As MultiWorkerMirroredStrategy: one script, the same on all workers, and TF_CONFIG."""
    (tmp_path / "train.py").write_text(JOINS)
    cluster = {"worker": [f"localhost:{free_port()}", "localhost:1"]}
    workers = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env=of_this_checkout()
            | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
            | {"GOSSAMER_QUIET": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    told = [worker.communicate(timeout=120)[0].strip() for worker in workers]
    assert told == [f"{rank} 2 [1.5, 1.5]" for rank in range(2)]
