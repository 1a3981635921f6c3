"""Sessions as functions of lists of arrays, as compiled programs call them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.elastic_groups import ElasticRun, Join
from support.virtual_workers import Worker, cluster

from gossamer.errors import LoopError
from gossamer.train.session.array_exchange import ArrayExchange, array_of, mean_logs, names_of


def exchange(recipe: str = "Dense()") -> ArrayExchange:
    return ArrayExchange({"a": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)}, recipe, {})


def test_variables_with_one_path_have_different_names() -> None:
    variables = [SimpleNamespace(path="dense/kernel"), SimpleNamespace(path="x"), SimpleNamespace(path="dense/kernel")]
    assert names_of(variables) == ["dense/kernel#0", "x", "dense/kernel#2"]
    assert names_of([SimpleNamespace(name="Variable:0")]) == ["Variable:0"]


def test_metrics_are_means_over_the_ranks_that_have_them() -> None:
    found = mean_logs([{"loss": 1.0, "f1": [0.0, 1.0], "val_loss": 3.0}, {"loss": 2.0, "f1": np.array([1.0, 1.0])}])
    assert (found["loss"], found["val_loss"], found["f1"].tolist()) == (1.5, 3.0, [0.5, 1.0])


def test_means_come_with_whether_to_make_a_step() -> None:
    def work(worker: Worker) -> Any:
        options = {"transport": worker.transport}
        found = ArrayExchange({"a": np.zeros(2, np.float32)}, "EveryStep(accumulate=2)", options)
        seen = []
        for number in range(2):
            mean, used = found.give(np.full(2, worker.rank + number, np.float32))
            seen.append((mean.tolist(), bool(used)))
            found.took_step(np.zeros(2, np.float32))
        found.session.close()
        return seen

    first, second = cluster(work, 2)
    assert [used for _, used in first] == [used for _, used in second] == [False, True]
    assert first[1] == second[1]


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_parameters_that_did_not_change_are_the_given_arrays(kind: Any) -> None:
    found = exchange()
    given = [kind(np.ones(3, np.float32)), kind(np.ones(1, np.float32))]
    *mean, used = found.give(*given)
    assert used
    assert [type(each) for each in mean] == [type(each) for each in given]
    after = found.took_step(*given)
    assert all(new is own for new, own in zip(after, given, strict=True))
    found.session.close()


def test_a_newcomer_to_an_elastic_run_receives_moments_and_epoch() -> None:
    def work(worker: Worker) -> Any:
        first = [np.zeros(2, np.float32)]
        found = ArrayExchange({"a": np.zeros(2, np.float32)}, "Dense()", {"transport": worker.transport}, first)
        worker.array_sessions.append(found.session)
        moment, epoch, steps = found.moments[0].numpy(), found.epoch, found.session.steps
        array = array_of(found.session.parameters["a"], first[0])
        while found.session.steps < 4:
            found.epoch = found.session.steps
            mean, used = found.give(np.ones(2, np.float32))
            assert used
            moment = moment + mean
            (array,) = found.took_step(array - moment, moment)
        return found.joined, epoch == steps, array.tolist(), moment.tolist()

    first, second, newcomer = ElasticRun(2, newcomers=1, join=Join(op=5))(work)
    assert first == second
    assert (first[0], newcomer[0]) == (False, True)
    assert newcomer[1:] == first[1:]
    assert newcomer[3] == [4.0, 4.0]


def test_an_error_is_raised_at_once_or_kept_for_the_loop() -> None:
    found, given = exchange(), [np.ones(3, np.float32), np.ones(1, np.float32)]
    with pytest.raises(LoopError):
        found.took_step(*given)  # no gradients were given
    found.raises = False
    *same, used = found.give(*given)  # nothing is sent any more
    assert not used
    assert all(new is own for new, own in zip(same, given, strict=True))
    assert found.session.steps == 0
    with pytest.raises(LoopError):
        found.raise_failure()
    found.session.close()
