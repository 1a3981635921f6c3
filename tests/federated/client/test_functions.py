"""Client functions: rounds, updates, metrics, steps, and scripts that mark them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import federate, one_pass
from torch import nn

from gossamer.errors import LoopError
from gossamer.federated import Round, SGDSteps, Update
from gossamer.federated.client.functions import OTHER_NAME, load_script, weighted_mean
from gossamer.federated.messages import Report, encode

NUMBERS = [torch.tensor(0.5), torch.tensor([0.5], requires_grad=True), np.float32(0.5), np.array([[0.5]]), 0.5]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_metrics_are_plain_numbers_in_records_and_messages(number: Any) -> None:
    for told in (
        Update(samples=1, metrics={"loss": number}),
        SGDSteps(loss=torch.sum, batches=[], learning_rate=0.1, samples=1, metrics={"loss": number}),
    ):
        assert [type(value) for value in told.metrics.values()] == [float]
        assert json.loads(json.dumps(dict(told.metrics))) == {"loss": 0.5}
        assert encode(Report(samples=1, steps=1, metrics=dict(told.metrics)))


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(3), "0.5", None, 1j, 10**400], ids=str)
def test_metrics_that_are_no_number_are_refused_by_name(value: Any) -> None:
    with pytest.raises(LoopError, match=r"The metric 'loss' is .*metrics=\{\"loss\": float\(value\)\}"):
        Update(samples=1, metrics={"steps": 3, "loss": value})


def test_a_device_may_tell_a_tensor() -> None:
    def told_by_tensors(model: nn.Module, told: Round) -> Update:
        update = one_pass(model, told)
        return Update(samples=update.samples, metrics={"loss": torch.tensor(update.metrics["loss"]).double()})

    (commit,) = federate("FedAvg(fraction=1.0)", clients=2, rounds=1, function=told_by_tensors).commits
    assert all(type(report.metrics["loss"]) is float for report in commit.reports.values())


def round_of(**length: int) -> Round:
    return Round(index=3, client=7, **length)


def test_batches_are_as_many_as_the_recipe_says() -> None:
    assert list(round_of(local_steps=5).batches([1, 2, 3])) == [1, 2, 3, 1, 2]
    assert list(round_of(local_epochs=2).batches([1, 2])) == [1, 2, 1, 2]
    told = round_of(local_steps=2)
    assert told.batches_given is None
    assert list(told.batches(iter([1, 2, 3]))) == [1, 2]
    assert told.batches_given == 2


@pytest.mark.parametrize("length", [{"local_steps": 5}, {"local_epochs": 2}])
def test_a_loader_without_batches_gives_none(length: dict[str, int]) -> None:
    told = round_of(**length)
    assert list(told.batches([])) == []
    assert told.batches_given == 0


@pytest.mark.parametrize("length", [{"local_steps": 5}, {"local_epochs": 2}])
def test_a_loader_that_a_pass_used_up_is_refused(length: dict[str, int]) -> None:
    with pytest.raises(LoopError, match=r"Client 7 has no more batches in round 3: .*DataLoader"):
        list(round_of(**length).batches(iter([1, 2])))


def test_weighted_mean_does_not_overflow() -> None:
    assert weighted_mean([1.5e308, 1.5e308], [10**9, 10**9]) == 1.5e308
    assert weighted_mean([-1.5e308, 1.5e308], [3, 1]) == -0.75e308
    assert weighted_mean([1e-320], [2]) == 1e-320
    assert isnan(weighted_mean([nan, 1.0], [1, 1]))
    steps = SGDSteps(loss=torch.sum, batches=[], learning_rate=0.1, samples=1)
    assert steps.metrics_with_loss([1.5e308, 1.5e308]) == {"loss": 1.5e308}


def test_weighted_mean_rounds_as_the_plain_formula_does() -> None:
    random = Random(0)
    for _ in range(100):
        values = [random.uniform(-1e6, 1e6) for _ in range(9)]
        weights = [random.randrange(1, 10**6) for _ in range(9)]
        plain = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        assert weighted_mean(values, weights) == plain


SCRIPT = """
    import sys
    sys.path.insert(0, "another folder")
    import torch
    from torch import nn
    from gossamer import federated

    words = sys.argv[1:]

    class Net(nn.Linear):
        pass

    @federated.model
    def make():
        return Net(2, 1)

    @federated.client
    def train(model, told):
        from beside_the_script import samples
        return federated.Update(samples=samples + len(words))

    if __name__ == "__main__":
        raise SystemExit("it was started, not imported")
"""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("a_federation", "beside_the_script", OTHER_NAME):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside_the_script.py").write_text("samples = 3")
    return tmp_path


def written(folder: Path, name: str = "a_federation.py", script: str = SCRIPT) -> Path:
    path = folder / name
    path.write_text(dedent(script))
    return path


def test_functions_import_what_lies_next_to_the_script(folder: Path) -> None:
    """In a round, long after it was loaded, though the script changed the path as well."""
    before, argv = [*sys.path], sys.argv
    script = load_script(written(folder), ["a", "b"])
    assert script.train(script.model(), Round(index=0, client=0)).samples == 5
    assert sys.path == ["another folder", str(folder), *before]
    assert sys.argv is argv


def test_models_can_be_pickled(folder: Path) -> None:
    model, file = load_script(written(folder)).model(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert type(found) is type(model)
    assert type(model).__module__ == "a_federation"


def test_a_module_of_the_same_name_stays_what_it_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    import random

    script = load_script(written(folder, "random.py"))
    assert sys.modules["random"] is random
    assert type(script.model()).__module__ == OTHER_NAME
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    first, again, other = (load_script(written(each)).model() for each in (folder, folder, elsewhere))
    assert [type(each).__module__ for each in (first, again, other)] == ["a_federation", "a_federation", OTHER_NAME]


def test_a_script_that_fails_leaves_no_module(folder: Path) -> None:
    path = written(folder, script="from gossamer import federated\nraise ValueError('no data here')")
    with pytest.raises(ValueError, match="no data here"):
        load_script(path)
    assert "a_federation" not in sys.modules


def test_a_script_has_annotations_of_its_own_kind(folder: Path) -> None:
    """Not those of the file that loads it."""
    script = load_script(written(folder, script=SCRIPT + "\n    def one(x: 1 + 1) -> None: ...\n"))
    assert vars(sys.modules[script.model.__module__])["one"].__annotations__ == {"x": 2, "return": None}


def test_missing_marks_are_refused(folder: Path) -> None:
    with pytest.raises(LoopError, match=r"marks no function with @gossamer\.federated\.client"):
        load_script(written(folder, script="import torch"))
