"""gossamer.keras on the torch, JAX and TensorFlow backends: the same bytes and numbers as one process and as torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.keras_results import Results, results_of
from support.keras_torch import torch_run

pytestmark = [pytest.mark.processes, pytest.mark.new_programs, pytest.mark.timeout(600)]
BACKENDS = ("torch", "jax", "tensorflow")


@pytest.fixture(params=BACKENDS)
def result(request: pytest.FixtureRequest) -> Results:
    return results_of(request.param)


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_dense_has_the_bits_of_one_process_on_the_joined_batch_and_of_torch(result: Results) -> None:
    expected, count = torch_run("Dense()", "linear", 3)
    first, second = result["dense"]["ranks"]
    assert first == second == result["dense"]["alone"] == expected
    assert result["dense"]["bytes"] == count


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("dense", "Dense()"), ("topk", "TopK(0.1)"), ("diloco", "DiLoCo(period=3) + Float4()")],
)
def test_each_backend_sends_the_bytes_of_torch_and_reaches_its_parameters(
    result: Results, name: str, recipe: str
) -> None:
    expected, count = torch_run(recipe, "network", 6)
    found = result[f"network_{name}"]
    assert found["bytes"] == count
    assert sum(count) > 0
    assert found["ranks"][0] == found["ranks"][1]
    assert_close(found["ranks"][0], expected)


def test_servers_make_the_step_in_place_of_the_inner_optimizer(result: Results) -> None:
    expected, _ = torch_run("Dense()", "network", 3)
    (first, iterations), (second, _) = result["server"]
    assert iterations == 0
    assert first == second
    assert_close(first, expected)


def test_moving_averages_of_the_weights_stay_in_the_model_after_fit(result: Results) -> None:
    found = result["moving_averages"]
    (first, none), (second, _) = found["lock step"]
    assert first == second
    assert_close(first, found["alone"])
    assert not none
    (local, told), (local_there, _) = found["local"]
    assert local == local_there == found["local without"][0][0]  # those of each rank would differ
    assert "the averaged parameters of all ranks" in told[0]


def test_bfloat16_variables_are_averaged(result: Results) -> None:
    (dtype, first), (_, second) = result["bfloat16"]
    assert dtype == "bfloat16"
    assert first == second != [[1.0] * 4]


def test_a_variable_without_a_gradient_counts_as_zero(result: Results) -> None:
    for before, after in result["missing_gradient"]:
        assert after[1] == before[1]
        assert_close([np.subtract(after[0], before[0])], [np.full(len(before[0]), -0.75)])


# -- the callback ------------------------------------------------------------------------------------------------------


def test_logs_are_means_and_validation_uses_the_averaged_parameters(result: Results) -> None:
    (seen, history, parameters, after), (other, history_there, parameters_there, after_there) = result["metrics"]
    assert history == history_there
    assert [logs for _, logs in seen] == [logs for _, logs in other]  # later callbacks see the means
    assert all(mine != theirs for (mine, _), (theirs, _) in zip(seen, other, strict=True))  # own ones come back
    assert parameters == parameters_there
    assert after == after_there
    assert history["val_loss"][-1] == pytest.approx(after, abs=1e-6)


def test_a_metric_of_one_rank_reaches_all_ranks(result: Results) -> None:
    for first, second in result["metrics_of_one_rank"]:  # of recipes
        assert first == second
        assert {name: len(values) for name, values in first.items()} == {"loss": 2, "val_loss": 2}


def test_a_rank_with_fewer_batches_takes_over_parameters_and_moments(result: Results) -> None:
    (steps, moments, parameters), (steps_there, moments_there, parameters_there) = result["uneven"]
    assert steps == steps_there == 6
    assert moments == moments_there
    assert parameters == parameters_there


def test_a_newcomer_to_an_elastic_run_receives_epoch_parameters_and_moments(result: Results) -> None:
    first, second, newcomer = result["elastic"]
    assert first == second
    assert first[1] == 2
    assert newcomer[1] == 1  # it trains in the second epoch alone
    assert [newcomer[0], *newcomer[2:]] == [first[0], *first[2:]]


def test_ranks_begin_with_the_same_statistics_and_frozen_weights_and_keep_their_seeds(result: Results) -> None:
    for (weights, seeds), (weights_there, seeds_there) in result["statistics"]:  # built before fit, and by fit
        assert weights == weights_there
        assert len(weights) == 4  # mean and variance; kernel and bias of the frozen layer
        assert seeds != seeds_there


def test_a_newcomer_to_an_elastic_run_receives_statistics_and_frozen_weights(result: Results) -> None:
    first, second, newcomer = result["elastic_statistics"]
    assert first[3][0] == second[3][0]
    assert newcomer[1] == 1
    received, expected = (np.concatenate(worker[3][0]) for worker in (newcomer, first))
    np.testing.assert_allclose(received, expected, atol=0.5)  # its own began at 2000


def test_an_elastic_run_copies_statistics_in_each_step_and_frozen_weights_once_per_epoch(result: Results) -> None:
    for _, epochs, _, (_, copies) in result["elastic_statistics"][:2]:
        assert epochs == 2
        assert copies == [8, 8, 2, 2]  # mean and variance in 8 steps; kernel and bias of the frozen layer


def test_a_request_to_stop_ends_fit_on_all_ranks_after_the_same_step(result: Results) -> None:
    (steps, parameters), (steps_there, parameters_there) = result["stopped"]
    assert steps == steps_there == 3
    assert parameters == parameters_there


@pytest.mark.parametrize("name", ["topk", "diloco"])
def test_a_resumed_fit_has_the_bits_of_an_uninterrupted_one(result: Results, name: str) -> None:
    found = result[f"resumed_{name}"]
    assert [epochs for epochs, _ in found["resumed"]] == [[2, 3]] * 2
    assert [parameters for _, parameters in found["resumed"]] == found["whole"]


FITS = """
import sys, keras, numpy as np
from gossamer.keras import GossamerCallback, GossamerOptimizer

def epochs_of(model, **callback):
    began = []
    keeps = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs=None: began.append(epoch))
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    model.fit(x, y, epochs=2 + callback["more"], verbose=0, callbacks=[GossamerCallback(callback["folder"]), keeps])
    return began

def model():
    keras.utils.clear_session()
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile(GossamerOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    return made

first = model()
assert epochs_of(first, more=0, folder=sys.argv[1]) == [0, 1]
first.optimizer.session.close()
resumed = model()
assert epochs_of(resumed, more=1, folder=sys.argv[1]) == [2]
assert epochs_of(resumed, more=0, folder=None) == [0, 1]
assert epochs_of(resumed, more=1, folder=sys.argv[1]) == []  # all epochs were made
assert epochs_of(resumed, more=0, folder=None) == [0, 1]
"""


def run_alone(program: str, *arguments: str) -> None:
    """Run a program in a world of one, on the torch backend."""
    if find_spec("keras") is None:
        pytest.skip("keras is not installed")
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_fit_after_a_resumed_one_begins_at_its_own_first_epoch(tmp_path: Path) -> None:
    run_alone(FITS, str(tmp_path / "saved"))


SETTINGS = """
import keras, numpy as np
from gossamer.keras import GossamerCallback, GossamerOptimizer

optimizer = GossamerOptimizer(keras.optimizers.AdamW(0.0, weight_decay=0.5))
optimizer.exclude_from_weight_decay(var_names=["bias"])
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, bias_initializer="ones")])
model.compile(optimizer, loss="mse", metrics=[keras.metrics.F1Score(average=None)])
optimizer.learning_rate = 0.5  # gradients are zeros
x, y = np.zeros((8, 4), "float32"), np.ones((8, 3), "float32")
history = model.fit(x, y, epochs=2, verbose=0, callbacks=[GossamerCallback()]).history
assert [np.shape(each) for each in history["f1_score"]] == [(3,), (3,)]  # one for each class
assert [np.shape(each) for each in history["loss"]] == [(), ()]
kernel, bias = model.get_weights()
assert bias.tolist() == [1.0] * 3
"""


def test_metrics_of_each_class_are_logged_and_biases_can_be_excluded_from_weight_decay() -> None:
    run_alone(SETTINGS)


def test_a_model_file_contains_the_inner_optimizer_and_the_recipe(result: Results) -> None:
    assert result["saved"] == ["Adam", "TopK(0.1)", 1]


def test_the_example_of_the_page_learns(result: Results) -> None:
    assert result["page"][-1] < result["page"][0]


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_batch_that_is_not_finite_makes_no_step_on_any_rank(result: Results) -> None:
    found = result["non_finite"]
    (steps, iterations, parameters), (steps_there, iterations_there, parameters_there) = found["one"]
    assert steps == steps_there == iterations == iterations_there == 6
    assert parameters == parameters_there
    assert all(isfinite(value) for each in parameters for value in each)
    assert found["skipped"]
    assert all(rank == 1 and tensor.startswith("m/") for rank, tensor in found["skipped"])


def test_numbers_that_stay_non_finite_raise_an_error_with_variable_and_rank(result: Results) -> None:
    for (kind, message), iterations in result["non_finite"]["all"]:
        assert kind == "NonFiniteError"
        assert "on rank 1" in message
        assert '"m/' in message
        assert iterations == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other", ('"wide"', '"m/second/kernel"', "rank 0", "model.compile(")),
        ("fewer", ('missing: "m/first/kernel"', "rank 0", "model.compile(")),
        ("dtype", ('"m/first/kernel"', "float16", "rank 0", "keras.ops.cast(")),
        ("fit", ("new:", "(1, 2)", "rank 0", "model.compile(")),
    ],
)
def test_a_rebuilt_model_is_refused_with_variable_and_rank(result: Results, name: str, words: tuple[str, ...]) -> None:
    kind, message = result["rebuilt"][name]
    assert kind == "LayoutError", message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("scaled", "mixed_bfloat16"),
        ("scaling", "auto_scale_loss=False"),
        ("accumulating", "EveryStep(accumulate=4)"),
        ("unbuilt", "optimizer.build("),
        ("callback", "GossamerOptimizer(optimizer, recipe)"),
        ("jit", "jit_compile=False"),
        ("traced", "model.build("),
        ("strategy", "gossamer run --workers 4"),
    ],
)
def test_settings_that_cannot_be_averaged_are_refused_with_the_line_to_write(
    result: Results, name: str, line: str
) -> None:
    if name not in result["refused"]:
        pytest.skip("this backend has no such setting")
    kind, message = result["refused"][name]
    assert kind == "AttachError", message
    assert line in message
