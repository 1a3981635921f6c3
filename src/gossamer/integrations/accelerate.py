"""Accelerate adapter: attaches a model that an Accelerator prepares, in place of DistributedDataParallel.

    session = gossamer.integrations.accelerate.attach(accelerator, model, optimizer, "TopK(0.01)")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Accelerate still places, casts and compiles the model, shards batches and gathers metrics. Gossamer averages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer import attach as attach_session
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import AttachError, CheckpointError
from gossamer.integrations.library_versions import require_library
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.session import Session
from gossamer.train.world_state import current

require_library("accelerate", "1.6", extra="accelerate")

from accelerate import Accelerator  # noqa: E402 - a version below the floor is refused first

__all__ = ["attach"]
FOLDER = "gossamer"  # in the library's own directory of one checkpoint


def save_within(session: Session, checkpoint: str | os.PathLike[str], folder: str = FOLDER) -> None:
    """Save each rank's session state in the library's checkpoint directory. All ranks call it, at the same step."""
    session.save(os.path.join(checkpoint, folder), keep=1, saved=True, steps=session.steps)


def load_within(
    session: Session, checkpoint: str | os.PathLike[str], folder: str = FOLDER, steps: int | None = None
) -> None:
    """Resume from a checkpoint of `save_within`. All ranks call it, after the library has loaded its own state.

    Args:
        steps: The number of steps before the library's own state was saved, if known.

    Raises:
        CheckpointError: if the checkpoint has no session state, or one of another step than the library's own.
    """
    found = session.load(os.path.join(checkpoint, folder))
    if None not in (steps, found.get("steps")) and steps != found["steps"]:
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} has files of two steps: the session's of step {found['steps']}, the "
            f"library's of step {steps}. A save into a folder with an earlier state was interrupted. Resume from "
            'another checkpoint, and save each into its own folder: accelerator.save_state(f"state-{session.steps}").'
        )
    if not found.get("saved"):
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} has no folder {folder!r}: it was written without Gossamer, or is incomplete, "
            "so it lacks each worker's residuals and, under local training, each worker's parameters. Resume from an "
            "earlier checkpoint; or start a new training with its model: Model.from_pretrained(...), without resuming."
        )


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, recipe: Written = None, **options: Any
) -> Session:
    """Attach `model` to the other workers by `recipe`. Call it before accelerator.prepare().

    accelerator.prepare() then returns the model placed, cast and compiled, but not wrapped in DDP.
    accelerator.accumulate, no_sync, clip_grad_norm_ and gather work as usual; save_state and load_state include the
    session, with each rank's part in the folder `gossamer`, or `gossamer-1` for the second session of an accelerator.

    Args:
        accelerator: The Accelerator that will prepare the model.
        model, optimizer, recipe: As for gossamer.attach.
        options: Other arguments of gossamer.attach except `scaler`. The accelerator's scaler is used.

    Raises:
        AttachError: if the model is wrapped already, Accelerate would shard it, the run is elastic, or Accelerate and
            Gossamer have different ranks or world sizes; and for all errors of gossamer.attach.

    Example:
        accelerator = Accelerator()
        session = gossamer.integrations.accelerate.attach(accelerator, model, optimizer, "TopK(0.01)")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    refuse_other_world(accelerator)
    _refuse_wrapped(model)
    leave_out_ddp(accelerator, model)
    if accelerator.device_placement:
        model.to(accelerator.device)  # prepare() would do it afterwards, when parameters must not move any more
    session = attach_session(model, optimizer, recipe, scaler=accelerator.scaler, **options)
    share_no_sync(accelerator, session)
    _CheckpointedSession(session).register(accelerator)
    return session


def refuse_other_world(accelerator: Accelerator) -> None:
    """Raise AttachError if Accelerate shards data over other workers than Gossamer averages over."""
    if is_elastic():
        raise AttachError(
            "Accelerate reads the number of workers once, and in an elastic run that number changes. Use a fixed "
            "number: gossamer run --workers 4; or write the loop yourself, with gossamer.attach."
        )
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise AttachError(
            f"Accelerate would shard this model or send its gradients itself ({kind}), but Gossamer averages gradients "
            "of unsharded models. Remove the plugin from Accelerator(...) and from `accelerate config`."
        )
    world, sees = current(), (accelerator.process_index, accelerator.num_processes)
    if sees != (world.rank, world.size):
        raise AttachError(
            f"this process is rank {world.rank} of {world.size} in Gossamer, and rank {sees[0]} of {sees[1]} in "
            "Accelerate, so Accelerate would shard the data over a different set of workers. Without GPUs Accelerate "
            "needs a setting to detect other workers: export ACCELERATE_USE_CPU=1, or write Accelerator(cpu=True), or "
            "TrainingArguments(..., use_cpu=True)."
        )


def _refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "accelerator.prepare() has wrapped this model in DistributedDataParallel already, which averages gradients "
            "itself. Call gossamer.integrations.accelerate.attach(accelerator, model, optimizer, recipe) above "
            "accelerator.prepare(...)."
        )


def leave_out_ddp(accelerator: Accelerator, model: nn.Module | None = None) -> None:
    """Make accelerator.prepare() prepare `model`, or every model, in evaluation mode: Accelerate then places, casts
    and compiles it without wrapping it in DDP."""
    prepare = accelerator.prepare_model

    def prepare_model(
        each: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        is_own = model is None or each is model
        prepared: nn.Module = prepare(each, device_placement, evaluation_mode=evaluation_mode or is_own)
        return prepared

    accelerator.prepare_model = prepare_model


def share_no_sync(accelerator: Accelerator, session: Session) -> None:
    """Make accelerator.no_sync(), and thus accumulate(), use the session's no_sync for its model."""
    without_gossamer = accelerator.no_sync

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        is_own = accelerator.unwrap_model(model, keep_torch_compile=False) is session.model
        with session.no_sync() if is_own else without_gossamer(model):
            yield

    accelerator.no_sync = no_sync


class _CheckpointedSession:
    """Includes a session in accelerator.save_state() and load_state().

    For a registered object, Accelerate writes one file on one rank and does not pass the directory. Hooks receive the
    directory on every rank. Objects are loaded last, after models and optimizers, which are saved by rank 0 only.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._directory, self._folder = session, "", FOLDER
        self._hooks: list[Any] = []

    def register(self, accelerator: Accelerator) -> None:
        """Each open session, such as of a GAN's generator and of its critic, has a folder of its own."""
        for earlier in _registered(accelerator):
            if earlier._session not in open_sessions():
                earlier._unregister(accelerator)
        taken = {each._folder for each in _registered(accelerator)}
        names = (FOLDER, *(f"{FOLDER}-{number}" for number in range(1, len(taken) + 1)))
        self._folder = next(name for name in names if name not in taken)
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._find),
        ]
        accelerator.register_for_checkpointing(self)

    def _unregister(self, accelerator: Accelerator) -> None:
        for hook in self._hooks:
            hook.remove()
        accelerator._custom_objects.remove(self)

    def _save(self, models: Sequence[nn.Module], weights: Sequence[Any], directory: str) -> None:
        save_within(self._session, directory, self._folder)

    def _find(self, models: Sequence[nn.Module], directory: str) -> None:
        self._directory = directory

    def state_dict(self) -> dict[str, Any]:
        """Accelerate writes it after all other files, `_save` before them."""
        return {"recipe": repr(self._session.recipe), "steps": self._session.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_within(self._session, self._directory, self._folder, state.get("steps"))


def _registered(accelerator: Accelerator) -> list[_CheckpointedSession]:
    return [each for each in accelerator._custom_objects if isinstance(each, _CheckpointedSession)]
