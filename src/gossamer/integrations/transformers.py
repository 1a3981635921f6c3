"""Transformers adapter: a Trainer that averages with the other workers by a recipe.

    GossamerTrainer(model, TrainingArguments(...), train_dataset=data, recipe="DiLoCo(period=50) + Int8()").train()

Transformers shards batches, clips, schedules, logs, evaluates and saves as under DistributedDataParallel. The model is
not wrapped; Gossamer averages.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.nn.utils import get_total_norm

from gossamer import attach, events
from gossamer.algorithms.strategies import GradientStage
from gossamer.errors import AttachError
from gossamer.integrations.accelerate import leave_out_ddp, load_within, refuse_other_world, save_within, share_no_sync
from gossamer.integrations.library_versions import require_library
from gossamer.train.engine.parameter_views import copy_parameters, state_of, trainable
from gossamer.train.moments.take_over import RULES, ownership
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.session import Session

require_library("transformers", "5.23", extra="transformers")

from accelerate.data_loader import DataLoaderDispatcher  # noqa: E402 - a version below the floor is refused first
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402

__all__ = ["GossamerTrainer"]


def refuse_contradictions(session: Session, args: Any) -> None:
    """Raise AttachError if the Trainer's loop is incompatible with the recipe. args: TrainingArguments."""
    for stage in session.recipe.strategy.stages:
        if isinstance(stage, GradientStage) and stage.accumulates:
            raise AttachError(
                f"{session.recipe} accumulates several backward passes per step, but the Trainer, its scheduler and "
                "its checkpoints would count each pass as a step. Let the Trainer accumulate: "
                f"TrainingArguments(..., gradient_accumulation_steps={stage.accumulate}), and EveryStep()."
            )
        if not stage.in_lock_step:
            raise AttachError(
                f"{session.recipe} is asynchronous, but the Trainer gathers losses, metrics and checkpoints from all "
                "workers: all would wait for the slowest worker, and forever for a lost one. Use DiLoCo(period=50) or "
                "LocalSGD(period=8), or write the loop yourself, with gossamer.attach."
            )
    if args.max_grad_norm and _arrives_with_momentum(session):
        raise AttachError(
            f"max_grad_norm={args.max_grad_norm} would clip the averages of {session.recipe}, which include momentum: "
            "the clipped part was sent already and would be lost. Write TrainingArguments(..., max_grad_norm=0), and "
            f"clip before compression, for example DGC(density=0.01, clip={args.max_grad_norm})."
        )


def _arrives_with_momentum(session: Session) -> bool:
    owners = ownership(session.recipe.compressor, trainable(session.model)).values()
    return any(RULES[owner.rule].arrives_with_momentum for owner in owners)


def keep_step_local(session: Session, args: Any) -> None:
    """Under local training, count the tokens of a batch locally: the Trainer would gather counts before every step."""
    if session.recipe.strategy.local_parameters:
        args.average_tokens_across_devices = False


def notice_dispatching(train_dataloader: Any) -> None:
    """Log a notice if rank 0's loader sends every batch to all others. Batches may be larger than gradients."""
    if isinstance(train_dataloader, DataLoaderDispatcher):
        events.notice(
            "rank 0 reads the data and sends each batch to the other ranks, because the dataset is iterable. These "
            "bytes are additional to the recipe's. Let every rank read its own part: "
            "accelerator_config={'dispatch_batches': False}"
        )


_OF_SPEED = ("_runtime", "_per_second")  # suffixes of the Trainer's throughput metrics; the session has its own


class GossamerTrainer(Trainer):  # type: ignore[misc]  # untyped where the library is not installed
    """A Trainer that averages with the other workers of this job by `recipe`; None means Dense().

    For a trainer of another library, such as SFTTrainer: class MyTrainer(GossamerTrainer, SFTTrainer): pass. `session`
    is the open session during training. Checkpoints contain each rank's part of it in the folder `gossamer`;
    train(resume_from_checkpoint=...) resumes bit-exactly. Under local training, evaluation, prediction and the saved
    model use the merged parameters.

    Args:
        args, kwargs, recipe: as for transformers.Trainer; the recipe as for gossamer.attach.

    Raises:
        AttachError: when training begins, if the Trainer's arguments are incompatible with the recipe; and for all
            errors of gossamer.attach.

    Example:
        trainer = GossamerTrainer(model, arguments, train_dataset=dataset, recipe="TopK(0.01)")
    """

    def __init__(self, *args: Any, recipe: Written = None, **kwargs: Any) -> None:
        self.recipe = recipe
        self.session: Session | None = None
        self._resumed: str | None = None  # the checkpoint to resume from
        self._open = ExitStack()
        super().__init__(*args, **kwargs)
        self.add_callback(_SessionCallback(self))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        leave_out_ddp(self.accelerator)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            self._resumed = get_last_checkpoint(self.args.output_dir)
        else:
            self._resumed = resume_from_checkpoint or None
        with self._open:
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def open_session(self, train_dataloader: Any, steps: int) -> None:
        """Attach the prepared model and optimizer, and load the checkpoint of a resumed training. All ranks call it."""
        refuse_other_world(self.accelerator)
        scaler, known = self.accelerator.scaler, steps if steps > 0 else None
        session = attach(self.model, self.optimizer, self.recipe, scaler=scaler, replace=True, steps=known)
        self.session = self._open.enter_context(session)
        self._open.callback(setattr, self, "session", None)
        refuse_contradictions(session, self.args)
        notice_dispatching(train_dataloader)
        keep_step_local(session, self.args)
        share_no_sync(self.accelerator, session)
        if self._resumed:
            load_within(session, self._resumed)

    def close_session(self) -> None:
        """Close the session. Under local training, the model keeps the merged parameters that were saved."""
        if self.session is not None and self.session.recipe.strategy.local_parameters:
            with self._merged():
                agreed = {name: tensor.clone() for name, tensor in state_of(self.model).items()}
            copy_parameters(agreed, state_of(self.model))
        self._open.close()

    def _merged(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.session is None else self.session.averaged_parameters(self.model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._merged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # By itself the Trainer saves on every rank, as merging may need; a user may on one
        with self._merged() if _internal_call else nullcontext():
            super().save_model(output_dir, _internal_call=_internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The checkpoint is complete before callbacks such as an upload; a trial of a search has its own folder."""
        super()._save_checkpoint(model, trial)
        if self.session is not None and not self.args.save_only_model:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_within(self.session, os.path.join(self._get_output_dir(trial), name))

    def _load_best_model(self) -> None:
        self.close_session()  # closing later would overwrite the best parameters with the last merged ones
        super()._load_best_model()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # the Trainer's own multiplies by one; momentum compressors take this for clipping
            self.accelerator.unscale_gradients()
            grad_norm = get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        return super()._get_grad_norm(model, grad_norm=grad_norm)


class _SessionCallback(TrainerCallback):  # type: ignore[misc]
    """Opens and closes a trainer's session, and passes it the trainer's logs."""

    def __init__(self, trainer: GossamerTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self._trainer.open_session(train_dataloader, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._session.should_stop:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self._trainer.session is not None:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
            self._trainer.session.log(**{name: numbers[name] for name in numbers if not name.endswith(_OF_SPEED)})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.close_session()

    @property
    def _session(self) -> Session:
        session: Session | None = self._trainer.session
        assert session is not None, "on_train_begin has opened it"
        return session
