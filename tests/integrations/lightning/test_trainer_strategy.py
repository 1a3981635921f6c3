"""Trainer strategy in a world of one: Lightning's features around a session, and what is left when it is over."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from support.lightning_training import ByHand, Tiny, flat, loader, momentum, samples, trainer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import LoopError
from gossamer.integrations.lightning import GossamerStrategy, collectives

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


def fitted(folder: Path, model: Tiny | None = None, recipe: str = "TopK(density=0.3)", **options: Any) -> Tiny:
    model = Tiny() if model is None else model
    trainer(folder, GossamerStrategy(recipe), **options).fit(model, loader(), loader())
    return model


def test_alone_it_is_lightnings_own_training(tmp_path: Path) -> None:
    plain = Tiny()
    trainer(tmp_path, "auto").fit(plain, loader(), loader())
    assert torch.equal(flat(fitted(tmp_path, use_distributed_sampler=False)), flat(plain))
    assert not torch.equal(flat(Tiny()), flat(plain))


@pytest.mark.parametrize("name", ["gossamer", "GOSSAMER"])
def test_it_goes_by_its_name_and_can_be_asked_before_a_fit(tmp_path: Path, name: str) -> None:
    strategy = trainer(tmp_path, name).strategy
    assert type(strategy) is GossamerStrategy
    strategy.barrier()
    assert strategy.all_gather(torch.ones(2)).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"fast_dev_run": True}, 1),
        ({"overfit_batches": 2}, 4),
        ({"max_steps": 3}, 3),
        ({"accumulate_grad_batches": 3}, 6),
        ({"num_sanity_val_steps": 2}, 16),
        ({"precision": "bf16-mixed"}, 16),
        ({"precision": "64-true"}, 16),
        ({"plugins": [MixedPrecision("16-mixed", "cpu")]}, 16),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),  # no addresses of objects
)
def test_options_of_the_trainer(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    model, fit = Tiny(), trainer(tmp_path, GossamerStrategy("DiLoCo(period=3)"), **options)
    fit.fit(model, loader(), loader())
    assert fit.global_step == steps
    assert flat(model).isfinite().all()
    assert not torch.equal(flat(model), flat(Tiny()).to(flat(model).dtype))


def test_the_session_has_the_loops_scaler_and_is_closed_at_the_end(tmp_path: Path) -> None:
    scalers = []

    class Looks(Tiny):
        def on_train_batch_end(self, *_: Any) -> None:
            scalers.append(self.trainer.strategy.session.scaler)

    plugin = MixedPrecision("16-mixed", "cpu")
    model = Looks()
    fit = trainer(tmp_path, GossamerStrategy("Dense()"), plugins=[plugin])
    fit.fit(model, loader())
    assert set(scalers) == {plugin.scaler}
    assert fit.strategy.session is None
    assert list(open_sessions()) == []


def test_the_session_is_closed_after_an_exception(tmp_path: Path) -> None:
    class Fails(Tiny):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            assert list(open_sessions()) == [self.trainer.strategy.session]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path, Fails())
    assert list(open_sessions()) == []


def test_a_checkpoint_after_an_exception_asks_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Tiny):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number == 2:
                monkeypatch.setattr(collectives, "barrier", lambda: pytest.fail("waits for others"))
                raise ZeroDivisionError
            return super().training_step(batch, number)

    saves = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path, Fails(), recipe="DiLoCo(period=3)", enable_checkpointing=True, callbacks=[saves])
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    assert not list(tmp_path.glob("*.gossamer"))


def test_a_checkpoint_after_an_exception_leaves_no_state_of_an_earlier_step(tmp_path: Path) -> None:
    class Fails(Tiny):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number == 3:
                raise ZeroDivisionError
            return super().training_step(batch, number)

    saves = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=2, save_on_exception=True)
    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path, Fails(), recipe="DiLoCo(period=3)", enable_checkpointing=True, callbacks=[saves])
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3
    assert not (tmp_path / "last.ckpt.gossamer").exists()


def test_clipping_at_attach_goes_with_lightnings_closures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clipped, by_lightning = Tiny(), Tiny()
    trainer(tmp_path, GossamerStrategy("Dense()", clip_norm=0.25)).fit(clipped, loader())
    trainer(tmp_path, GossamerStrategy("Dense()"), gradient_clip_val=0.25).fit(by_lightning, loader())
    assert torch.equal(flat(clipped), flat(by_lightning))
    assert not torch.equal(flat(clipped), flat(fitted(tmp_path, recipe="Dense()")))
    monkeypatch.setattr(GossamerStrategy, "optimizer_step", DDPStrategy.optimizer_step)
    with pytest.raises(LoopError, match="a closure computes gradients within it"):
        trainer(tmp_path, GossamerStrategy("Dense()", clip_norm=0.25)).fit(Tiny(), loader())


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_training_step_left_out_is_none(tmp_path: Path) -> None:
    class LeavesOut(Tiny):
        def training_step(self, batch: Any, number: int) -> torch.Tensor | None:  # type: ignore[override]
            return None if number == 2 else super().training_step(batch, number)

    steps = []

    class Counts(LeavesOut):
        def on_train_end(self) -> None:
            steps.append(self.trainer.strategy.session.steps)

    fitted(tmp_path, Counts(), max_epochs=1)
    assert steps == [7]


def test_an_optimizer_that_needs_its_closure_has_it(tmp_path: Path) -> None:
    model = Tiny(rule=lambda parameters: LBFGS(parameters, 0.1, max_iter=2))
    fitted(tmp_path, model, recipe="Dense()", max_epochs=1)
    assert not torch.equal(flat(model), flat(Tiny()))


@pytest.mark.parametrize("optimizers", [1, 2])
def test_manual_optimization(tmp_path: Path, optimizers: int) -> None:
    model = fitted(tmp_path, ByHand(optimizers))
    assert not torch.equal(flat(model), flat(Tiny()))


def test_a_module_without_an_optimizer_has_no_session(tmp_path: Path) -> None:
    class Bare(Tiny):
        def configure_optimizers(self) -> None:
            assert self.trainer.strategy.session is None

        def on_train_end(self) -> None:
            assert self.trainer.strategy.session is None

    with pytest.warns(UserWarning, match="no optimizer"):
        fitted(tmp_path, Bare())


def test_evaluation_without_fit_needs_no_session(tmp_path: Path) -> None:
    alone, model = trainer(tmp_path), Tiny()
    ((found,),) = [alone.validate(model, loader(), verbose=False)]
    assert found["missed"] > 0
    assert len(alone.predict(model, loader(samples().tensors[0]))) == 8
    assert list(open_sessions()) == []


def test_the_learning_rate_finder_begins_and_ends_a_session_of_its_own(tmp_path: Path) -> None:
    class Rated(Tiny):
        lr = 0.02

        def configure_optimizers(self) -> Any:
            return momentum(self.parameters())

    model, fit = Rated(), trainer(tmp_path, GossamerStrategy("DiLoCo(period=3)"))
    Tuner(fit).lr_find(model, loader(), num_training=8, update_attr=False)
    assert list(open_sessions()) == []
    assert torch.equal(flat(model), flat(Tiny())), "as before"
    fit.fit(model, loader())
    assert fit.global_step == 16


def test_defaults_of_ddp_are_accepted() -> None:
    """LightningCLI passes every argument that it finds in the signatures, also those of DistributedDataParallel."""
    found = inspect.signature(DistributedDataParallel.__init__).parameters.items()
    defaults = {name: each.default for name, each in found if name not in ("self", "module", "device_ids")}
    strategy = GossamerStrategy("Dense()", cluster_environment=None, **defaults)
    with pytest.raises(TypeError, match="given bucket_cap_mb, which"):
        GossamerStrategy("Dense()", **{**defaults, "bucket_cap_mb": 5})
    assert strategy.session is None


def test_ranks_are_those_of_the_launcher_where_no_environment_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    environment = GossamerStrategy("Dense()", cluster_environment=None).cluster_environment
    assert (environment.global_rank(), environment.world_size()) == (1, 2)


def test_arguments_of_ddp_are_refused() -> None:
    with pytest.raises(TypeError, match="find_unused_parameters, which it does not know"):
        GossamerStrategy("Dense()", find_unused_parameters=True)
