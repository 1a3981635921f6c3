"""Ray training: the same bits as without Ray, and a clear error where there is none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.federations import model_of, one_pass
from support.ray_starts import raylets
from torch import Tensor, nn

from gossamer.errors import LoopError
from gossamer.federated import Round, SGDSteps, Update, client
from gossamer.federated.virtual import ray_training
from gossamer.federated.virtual.simulate import simulate


def run(engine: str, **options: Any) -> torch.Tensor:
    train = options.pop("train", one_pass)
    found = simulate(train, model_of, "FedAvg(fraction=0.5)", clients=6, rounds=2, engine=engine, **options)
    return torch.cat([each.detach().reshape(-1) for each in found.model.parameters()])


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LoopError, match=r"pip install 'gossamer\[ray\]'"):
        run("ray")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="engine must be 'local' or 'ray', got 'spark'"):
        run("spark")


@pytest.mark.processes
@pytest.mark.new_programs
@pytest.mark.timeout(900)  # starts Ray
@pytest.mark.filterwarnings(  # Ray's own
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize("vectorized", [False, True])
def test_tasks_of_ray_give_the_same_bits(vectorized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def loss(model: nn.Module, inputs: Tensor) -> Tensor:
        return (model(inputs) - 1).square().mean()

    def steps(model: nn.Module, told: Round) -> Any:
        return SGDSteps(loss=loss, batches=[torch.randn(3, 4).double()], learning_rate=0.1, samples=3)

    def noisy(model: nn.Module, told: Round) -> Any:
        found = steps(model, told)
        found.run(model)
        return Update(samples=3)

    train = client(vectorized=True)(steps) if vectorized else noisy
    with raylets(1, cores=2) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)  # otherwise Ray starts a raylet, and once only
        try:
            assert torch.equal(run("ray", train=train), run("local", train=train))
            assert not torch.equal(run("ray", train=train, seed=1), run("local", train=train))
        finally:
            ray.shutdown()


def test_what_a_script_defines_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other machine has its file; what was imported is on all of them."""
    travel: list[Any] = []
    stub = SimpleNamespace(register_pickle_by_value=travel.append, dumps=lambda bundle: b"")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.cloudpickle", stub)
    script = ModuleType("a_federation")
    exec("def train(model, told): ...", vars(script))
    monkeypatch.setitem(sys.modules, "a_federation", script)
    for function in (script.train, one_pass):
        ray_training._pickled((function,), function)
    assert travel == [script]
