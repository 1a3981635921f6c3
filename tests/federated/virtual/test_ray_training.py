"""Ray training: the same bits as without Ray, and a clear error where there is none."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support.federations import model_of, one_pass

from gossamer.errors import LoopError
from gossamer.federated.virtual.simulate import simulate


def run(engine: str, **options: Any) -> torch.Tensor:
    found = simulate(one_pass, model_of, "FedAvg(fraction=0.5)", clients=6, rounds=2, engine=engine, **options)
    return torch.cat([each.detach().reshape(-1) for each in found.model.parameters()])


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LoopError, match=r"pip install 'gossamer\[ray\]'"):
        run("ray")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="engine is 'local' or 'ray', not 'spark'"):
        run("spark")


@pytest.mark.processes
def test_tasks_of_ray_give_the_same_bits() -> None:
    ray = pytest.importorskip("ray")
    try:
        assert torch.equal(run("ray"), run("local"))
        assert not torch.equal(run("ray", seed=1), run("local", seed=2))
    finally:
        ray.shutdown()
