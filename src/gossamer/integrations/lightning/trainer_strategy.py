"""Trainer strategy: attaches a LightningModule before its first batch, and closes the session when fit ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GradientStage, ServerStage
from gossamer.errors import AttachError
from gossamer.integrations.lightning import collectives, session_files
from gossamer.integrations.lightning.joined_strategy import JoinedStrategy
from gossamer.integrations.lightning.session_files import agreed_state, close_agreed
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.moments.take_over import RULES, ownership
from gossamer.train.session.recipe_choice import notice_few_rounds
from gossamer.train.session.session import Session


def refuse_counted_passes(recipe: Recipe) -> None:
    """Raise AttachError for a recipe that accumulates gradients: Lightning counts backward passes itself."""
    for stage in recipe.strategy.stages:
        if isinstance(stage, GradientStage) and stage.accumulates:
            raise AttachError(
                f"{recipe} accumulates several backward passes per step, but Lightning, its schedulers and max_steps "
                "would count each pass as a step. Remove accumulation from the recipe and write "
                f"Trainer(accumulate_grad_batches={stage.accumulate if stage.batches is None else 'N'})."
            )


def refuse_clipping(session: Session, clip: float, world: int) -> None:
    """Raise AttachError if the optimizer does not use the gradients that Trainer(gradient_clip_val=clip) clips."""
    recipe = session.recipe
    without = f"Leave gradient_clip_val={clip} out"
    owners = ownership(recipe.compressor, trainable(session.model)).values() if world > 1 else ()
    if any(RULES[owner.rule].arrives_with_momentum for owner in owners):
        raise AttachError(
            f"gradient_clip_val={clip} would clip averages that include momentum and were sent already, so the clipped "
            f"part would be lost. {without} and write clip={clip} in {recipe.compressor!r}, which clips each gradient "
            "before momentum."
        )
    for stage in recipe.strategy.stages:
        served = isinstance(stage, ServerStage) and not stage.local_parameters
        if served or (isinstance(stage, GradientStage) and stage.delay):
            raise AttachError(
                f"gradient_clip_val={clip} clips the gradients of backward(), but with {recipe} the optimizer uses "
                f"other gradients. {without} and write GossamerStrategy(..., clip_norm={clip})."
            )


class GossamerStrategy(JoinedStrategy, DDPStrategy):  # type: ignore[misc]  # Any, where Lightning is not installed
    """Trains a LightningModule together with the other workers, by a recipe.

    The model is not wrapped. While fit runs, `session` is the session of gossamer.attach.

    Args:
        recipe: a recipe or its text; of `gossamer run --recipe` by default.
        clip_norm, verify, verify_every, record, log_to: as for gossamer.attach.
        options: further options of lightning's DDPStrategy.

    Raises:
        AttachError: for unsupported recipes and arguments, before the first batch.

    Example:
        trainer = lightning.Trainer(strategy=GossamerStrategy("DiLoCo(period=50)"))
    """

    strategy_name = "gossamer"
    session: Session | None = None
    _merged: ExitStack | None = None  # while the model has the merged parameters for validation
    _resumed: tuple[str | os.PathLike[str], dict[str, Any]] | None = None  # the checkpoint of this fit; see _place_of

    # -- joining and attaching ----------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._join()

    def configure_ddp(self) -> None:
        """The model stays as it is."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def setup(self, trainer: Any) -> None:
        """As DDPStrategy.setup, which broadcasts rank 0's model. A single worker that does not fit has no group."""
        if self.world_size > 1 or trainer.state.fn == "fit":
            super().setup(trainer)
        else:
            super(DDPStrategy, self).setup(trainer)

    @property
    def _interrupted(self) -> bool:
        """Whether this worker was interrupted and exits alone."""
        module = self.lightning_module
        return module is not None and bool(module.trainer.state.status == "interrupted")

    def barrier(self, name: str | None = None) -> None:
        if not self._interrupted:
            super().barrier(name)
        if name == "run-stage":  # everything is set up and restored, and no data were read
            self._begin()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.session is None:  # a fit within a fit, as the learning rate finder's
            self._begin()

    def _begin(self) -> None:
        """Attach the model of a fit, and load the session's state from its checkpoint."""
        trainer = self.lightning_module.trainer
        attached = [each for each in self.optimizers if each.param_groups]  # Lightning's stand-in for none has none
        if trainer.state.fn != "fit" or not attached:
            return
        self._end()
        scaler = getattr(self.precision_plugin, "scaler", None)
        known = trainer.max_steps if trainer.max_steps > 0 else None
        session = self._attach(self.lightning_module, attached[0], scaler=scaler, steps=known).__enter__()
        self.session = session
        refuse_counted_passes(session.recipe)
        if trainer.gradient_clip_val:
            refuse_clipping(session, trainer.gradient_clip_val, self.world_size)
        for number, optimizer in enumerate(attached[1:], start=1):
            session.track(**{f"optimizer_{number}": optimizer})
        for number, config in enumerate(self.lr_scheduler_configs):
            session.track(**{f"scheduler_{number}": config.scheduler})
        if self._resumed is not None:
            path, place = self._resumed
            session_files.load(session, path, **place)
            self._resumed = None
        _quiet_between_batches(trainer)
        if known is None:  # Lightning counts the batches of an epoch only with the random state that was loaded
            steps = trainer.estimated_stepping_batches
            if self.is_global_zero and self.world_size > 1 and 0 < steps < inf:
                notice_few_rounds(session.recipe, int(steps))

    def _end(self, failure: BaseException | None = None) -> None:
        """Close the session, if one is open. Without a failure, the model gets the merged parameters."""
        self.on_validation_end()
        session, self.session = self.session, None
        if session is None:
            return
        if failure is None:
            close_agreed(session)
        else:
            session.__exit__(type(failure), failure, None)

    def on_exception(self, exception: BaseException) -> None:
        self._end(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        self._end()
        self._resumed = None
        super().teardown()

    # -- in the loop --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself, so that its hooks receive the batch."""
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(self.model, self.lightning_module, "training_step", *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure with backward() before the step, since recipes exchange gradients between the two.

        If training_step returned None, there was no backward pass, and no step is made.
        """
        session, plugin, module = self.session, self.precision_plugin, model or self.lightning_module
        if session is None or isinstance(optimizer, LBFGS) or getattr(plugin, "scaler", None) is not None:
            found = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:
            found = plugin._wrap_closure(module, optimizer, closure)
            if found is not None or not module.automatic_optimization:
                optimizer.step(**kwargs)
        if session is not None and session.should_stop:
            module.trainer.should_stop = True
        return found

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate the gradients of all but the last batch of a step on this worker."""
        with ExitStack() as muted:
            if self.session is not None:
                muted.enter_context(self.session.no_sync())
            yield

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.session is not None:
            self._merged = ExitStack()
            self._merged.enter_context(self.session.averaged_parameters(self.lightning_module))

    def on_validation_end(self) -> None:
        super().on_validation_end()
        merged, self._merged = self._merged, None
        if merged is not None:
            merged.close()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return collectives.all_reduce(tensor, reduce_op) if isinstance(tensor, Tensor) else tensor

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, with merged parameters under local training."""
        if self.session is None or self._merged is not None or self._interrupted:
            return dict(super().lightning_module_state_dict())
        return agreed_state(self.session, super().lightning_module_state_dict)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Rank 0 writes Lightning's file; next to it every rank saves its session; see session_files.

        After an exception, such as with ModelCheckpoint(save_on_exception=True), only Lightning's file is written.
        """
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        whole = "optimizer_states" in checkpoint  # not weights alone
        if self.session is not None and whole and not self._interrupted:
            self.on_validation_end()  # each rank resumes from its own parameters
            session_files.save(self.session, filepath, **_place_of(checkpoint))
        elif self.is_global_zero:
            session_files.remove(filepath)  # of an earlier file with this name, such as last.ckpt

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            session_files.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        self._end()  # a checkpoint loaded within a fit starts a new session
        found: Mapping[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._resumed = checkpoint_path, _place_of(found)
        return found


def _place_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The values of Lightning's file that identify it among files that had its name."""
    return {name: checkpoint[name] for name in ("global_step",) if name in checkpoint}


def _quiet_between_batches(trainer: Any) -> None:
    """Disable the broadcast of SIGTERM before every batch: it would add one message per batch and synchronize all
    recipes. A rank that receives SIGTERM exits after its batch, and the others detect its exit."""
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None
