"""Parameter form: a model that is cast after attach is refused before its ranks part; resets name what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters
from torch import Tensor, nn

from gossamer.errors import AttachError, LayoutError
from gossamer.train.engine.parameter_check import ParameterForm

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
}


def cast(worker: Worker, recipe: str, act: Callable[[nn.Module], Any], when: int) -> Tensor:
    model, optimizer, _ = worker.start(network(0), sgd, recipe)
    for step in range(when + 2):
        if step == when:
            act(model)
        inputs, _ = batch(step, worker.rank, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("kind", CASTS)
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize(
    "recipe", ["Dense()", "TopK(0.1)", "EveryStep(delay=1)", "LocalSGD(period=2)", "Gossip() + Ring()"]
)
def test_a_cast_model_is_refused(recipe: str, when: int, kind: str) -> None:
    with pytest.raises(LayoutError, match=r'"0\.weight" was torch\.float64 on cpu at attach.*session\.close\(\) first'):
        cluster(lambda worker: cast(worker, recipe, CASTS[kind], when), 2)


def test_alone_too_since_the_same_script_would_fail_on_two() -> None:
    with pytest.raises(LayoutError, match=r"Write model\.to\("):
        cluster(lambda worker: cast(worker, "Dense()", CASTS["half"], 0), 1)


@pytest.mark.parametrize("recipe", ["LocalSGD(period=2)", "Gossip() + Ring()"])
def test_also_in_a_step_that_the_scaler_leaves_out(recipe: str) -> None:
    """No hook of the optimizer's is called then, and parameters are averaged all the same."""

    def work(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        model, optimizer, _ = worker.start(network(0), sgd, recipe, scaler=scaler)
        model.float()
        loss = model(batch(0, worker.rank, dtype=torch.float32)[0]).square().mean() * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    with pytest.raises(LayoutError, match=r'"0\.weight" was torch\.float64 on cpu at attach'):
        cluster(work, 2)


def test_without_the_check_ranks_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterForm, "pass_began", lambda self: None)
    one, other = cluster(lambda worker: cast(worker, "Dense()", CASTS["bfloat16"], 2), 2)
    assert not torch.equal(one, other)


def test_the_same_cast_changes_nothing() -> None:
    cluster(lambda worker: cast(worker, "Dense()", lambda model: model.double(), 1), 2)


@pytest.mark.parametrize("name", ["1.weigth", None, ["0.weight"]])
def test_a_reset_of_what_is_not_there_says_how_names_are_written(name: Any) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd)
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()
        session.reset_compressor_state(name)

    with pytest.raises(
        AttachError,
        match=r"no trainable parameters \[.*session\.reset_compressor_state\('head\.weight', 'head\.bias'\)",
    ):
        cluster(work, 1)
