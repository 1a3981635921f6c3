"""Accelerate adapter: attaches a model that an Accelerator prepares, in place of DistributedDataParallel.

    session = gossamer.integrations.accelerate.attach(accelerator, model, optimizer, "TopK(0.01)")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Accelerate goes on to place the model, cast, compile, deal out batches and gather; Gossamer averages.
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
from gossamer.comm.elastic.joined_run import is_elastic
from gossamer.errors import AttachError, CheckpointError
from gossamer.integrations.library_versions import require_library
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.session import Session
from gossamer.train.world_state import current

require_library("accelerate", "1.6", extra="accelerate")

from accelerate import Accelerator  # noqa: E402 - a version below the floor is refused first

__all__ = ["attach"]
FOLDER = "gossamer"  # in the library's own directory of one checkpoint


def save_within(session: Session, checkpoint: str | os.PathLike[str]) -> None:
    """Write every rank's part beside what the library wrote; every rank must call it, at the same step."""
    session.save(os.path.join(checkpoint, FOLDER), keep=1, saved=True)


def load_within(session: Session, checkpoint: str | os.PathLike[str]) -> None:
    """Go on from what `save_within` wrote; every rank must call it, after the library has loaded its own.

    Raises CheckpointError where the checkpoint has no such part.
    """
    if not session.load(os.path.join(checkpoint, FOLDER)).get("saved"):
        raise CheckpointError(
            f"{os.fspath(checkpoint)!r} has no folder {FOLDER!r}: it was written without Gossamer, or not to its end, "
            "so what each worker had still to send is not in it, nor where workers trained apart. Resume from an "
            "earlier one; or begin anew with its model: Model.from_pretrained(...), without resuming."
        )


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, recipe: Written = None, **options: Any
) -> Session:
    """Let `accelerator` train `model` together with the other workers, as `recipe` says; before accelerator.prepare().

    What prepare() returns is then the model itself, placed, cast and compiled, without DDP around it.
    accelerator.accumulate, no_sync, clip_grad_norm_ and gather are used as ever; save_state and load_state take the
    session along, each rank's part in the folder `gossamer`. options: of gossamer.attach, but for `scaler`, which is
    the accelerator's.

    Raises what gossamer.attach raises, and AttachError for a model that is wrapped already, for Accelerate's sharding,
    for an elastic run, and where Accelerate and Gossamer do not see the same workers.
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
    """Raise AttachError where Accelerate deals out work to other workers than Gossamer averages over."""
    if is_elastic():
        raise AttachError(
            "Accelerate deals out data and gathers among a number of workers that it learns once, and an elastic run's "
            "changes. Run a fixed number: gossamer run --workers 4; or write the loop yourself, with gossamer.attach."
        )
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise AttachError(
            f"Accelerate would shard this model or send its gradients itself ({kind}), and Gossamer averages gradients "
            "of whole models. Leave the plugin out of Accelerator(...) and of `accelerate config`."
        )
    world, sees = current(), (accelerator.process_index, accelerator.num_processes)
    if sees != (world.rank, world.size):
        raise AttachError(
            f"Gossamer has rank {world.rank} of {world.size} here, and Accelerate rank {sees[0]} of {sees[1]}, so data "
            "would be dealt out among others than those who train together. Without GPUs Accelerate sees other workers "
            "only where it is told: export ACCELERATE_USE_CPU=1, or write Accelerator(cpu=True), or "
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
    """Let accelerator.prepare() prepare `model`, or every model, as one that is only evaluated: that is its own way to
    place, cast and compile without wrapping for gradients."""
    prepare = accelerator.prepare_model

    def prepare_model(
        each: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        mine = model is None or each is model
        prepared: nn.Module = prepare(each, device_placement, evaluation_mode=evaluation_mode or mine)
        return prepared

    accelerator.prepare_model = prepare_model


def share_no_sync(accelerator: Accelerator, session: Session) -> None:
    """Let accelerator.no_sync(), and with it accumulate(), be the session's for its model."""
    without_gossamer = accelerator.no_sync

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        mine = accelerator.unwrap_model(model, keep_torch_compile=False) is session.model
        with session.no_sync() if mine else without_gossamer(model):
            yield

    accelerator.no_sync = no_sync


class _CheckpointedSession:
    """A session as accelerator.save_state() and load_state() take it along.

    They write one file for an object, on one rank, and tell it no directory; hooks do, on every rank. An object is
    loaded last, after models and optimizers of which rank 0's were saved.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._directory = session, ""

    def register(self, accelerator: Accelerator) -> None:
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._find)
        accelerator.register_for_checkpointing(self)

    def _save(self, models: Sequence[nn.Module], weights: Sequence[Any], directory: str) -> None:
        save_within(self._session, directory)

    def _find(self, models: Sequence[nn.Module], directory: str) -> None:
        self._directory = directory

    def state_dict(self) -> dict[str, Any]:
        return {"recipe": repr(self._session.recipe)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_within(self._session, self._directory)
