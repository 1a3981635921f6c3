"""Fabric strategy in a world of one: which optimizer is attached to which module, and what a load leaves."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning
import torch
from support.lightning_training import flat, loader, momentum, network
from support.virtual_workers import notices
from torch.nn.functional import mse_loss

from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.integrations.lightning import GossamerFabricStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*is deprecated:FutureWarning"),
]


def launched(recipe: str = "TopK(density=0.3)", **options: Any) -> Any:
    fabric = lightning.Fabric(strategy=GossamerFabricStrategy(recipe), accelerator="cpu", devices=1, **options)
    fabric.launch()
    return fabric


def train(fabric: Any, model: Any, optimizer: Any) -> None:
    for number, (inputs, targets) in enumerate(loader()):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(mse_loss(model(inputs), targets))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_models_are_not_wrapped_and_each_has_a_session() -> None:
    fabric = launched()
    models = [network(seed) for seed in range(2)]
    optimizers = [momentum(model.parameters()) for model in models]
    first, _ = fabric.setup(models[0], optimizers[0])
    second, later = fabric.setup_module(models[1]), fabric.setup_optimizers(optimizers[1])
    sessions = list(fabric.strategy.sessions)
    assert [session.model for session in sessions] == models
    assert [session.optimizer for session in sessions] == optimizers
    assert first.module is models[0]
    train(fabric, second, later)
    assert [session.steps for session in sessions] == [0, 4]
    assert not torch.equal(flat(models[1]), flat(network(1)))
    fabric.strategy.close()
    assert list(open_sessions()) == []


def test_a_second_optimizer_of_a_model_is_tracked() -> None:
    fabric, model = launched(), network()
    fabric.setup(model, momentum(model[0].parameters()), momentum(model[3].parameters()))
    assert [session.model for session in fabric.strategy.sessions] == [model]
    fabric.strategy.close()


def test_an_optimizer_that_is_set_up_before_its_model_is_attached_to_it() -> None:
    fabric, bare = launched("Dense()"), network()
    optimizer = fabric.setup_optimizers(momentum(bare.parameters()))
    fabric.setup_module(network(1))
    model = fabric.setup_module(bare)
    (session,) = fabric.strategy.sessions
    assert session.model is bare
    train(fabric, model, optimizer)
    assert session.steps == 4
    fabric.strategy.close()


def test_a_model_is_freed_after_its_session_was_closed() -> None:
    fabric, bare = launched("Dense()"), network()
    model, optimizer = fabric.setup(bare, momentum(bare.parameters()))
    freed = weakref.ref(bare)
    fabric.strategy.close()
    del bare, model, optimizer
    gc.collect()
    assert freed() is None


def test_a_loaded_model_is_attached_again(tmp_path: Path) -> None:
    fabric = launched("DiLoCo(period=3)")
    bare = network(1)
    model, optimizer = fabric.setup(bare, momentum(bare.parameters()))
    state = {"model": model, "optimizer": optimizer}
    fabric.save(tmp_path / "at first.ckpt", state)
    assert (tmp_path / "at first.ckpt.gossamer").is_dir()
    before, (session,) = flat(bare), fabric.strategy.sessions
    train(fabric, model, optimizer)
    assert not torch.equal(flat(bare), before)
    fabric.load(tmp_path / "at first.ckpt", state)
    assert torch.equal(flat(bare), before)
    (again,) = fabric.strategy.sessions
    assert again is not session
    assert again.steps == 0
    assert list(open_sessions()) == [again]
    train(fabric, model, optimizer)
    assert again.steps == 4
    fabric.strategy.close()


def test_weights_alone_are_saved_without_a_directory(tmp_path: Path) -> None:
    fabric, bare = launched(), network()
    model, _ = fabric.setup(bare, momentum(bare.parameters()))
    fabric.save(tmp_path / "weights.ckpt", {"model": model})
    assert [path.name for path in tmp_path.iterdir()] == ["weights.ckpt"]
    fabric.strategy.close()


def test_a_model_trains_on_with_its_session_if_there_is_no_checkpoint_to_load(tmp_path: Path) -> None:
    fabric, bare = launched(), network()
    model, optimizer = fabric.setup(bare, momentum(bare.parameters()))
    with pytest.raises(FileNotFoundError):
        fabric.load(tmp_path / "missing.ckpt", {"model": model, "optimizer": optimizer})
    (session,) = fabric.strategy.sessions
    assert list(open_sessions()) == [session]
    train(fabric, model, optimizer)
    assert session.steps == 4
    fabric.strategy.close()


def test_a_second_optimizer_is_tracked_after_a_load(tmp_path: Path) -> None:
    fabric, bare = launched(), network()
    model, *both = fabric.setup(bare, momentum(bare[0].parameters()), momentum(bare[3].parameters()))
    state = {"model": model, "first": both[0], "second": both[1]}
    fabric.save(tmp_path / "a.ckpt", state)
    with notices() as said:
        for _ in range(2):
            fabric.load(tmp_path / "a.ckpt", state)
            fabric.save(tmp_path / "a.ckpt", state)
    assert said == []
    fabric.strategy.close()
