"""Session files: the model that workers agree on, and each rank's part of a checkpoint beside Lightning's file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from gossamer import events
from gossamer.train.engine.parameter_views import copy_parameters, state_of
from gossamer.train.session.session import Session
from gossamer.train.world_state import current


def trains_apart(session: Session) -> bool:
    """Whether workers hold different parameters between rounds."""
    return any(stage.local_parameters for stage in session.recipe.strategy.stages)


def agreed_state(session: Session, state_dict: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `state_dict` gives of the model that the workers agree on. Every rank calls it."""
    if not trains_apart(session):
        return dict(state_dict())
    with session.averaged_parameters(session.model):
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state_dict().items()}


def close_agreed(session: Session) -> None:
    """End training on every rank, with the agreed state in its model: what is evaluated next is one model."""
    agreed = agreed_state(session, partial(state_of, session.model))
    session.__exit__(None, None, None)
    copy_parameters(agreed, state_of(session.model))


SUFFIX = ".gossamer"


def directory_of(path: str | os.PathLike[str], number: int = 0) -> str | None:
    """Where the states of the session of this number lie; None for a path that is no local file.

    A link to a checkpoint, such as ModelCheckpoint's last.ckpt, leads to the checkpoint's own.
    """
    text = os.fspath(path)
    return None if "://" in text else os.path.join(os.path.realpath(text) + SUFFIX, str(number))


def save(session: Session, path: str | os.PathLike[str], number: int = 0, **more: Any) -> None:
    """Write what a bit-exact resume needs beyond Lightning's file: residuals, rounds, random states, and parameters
    and optimizer of each rank. more: what Lightning's file has, too. Every rank calls it."""
    directory = directory_of(path, number)
    if directory is not None:
        session.save(directory, keep=1, checkpoint=os.path.basename(os.fspath(path)), **more)
    elif current().is_first:
        events.notice(
            f"{os.fspath(path)!r} is no local path, so what {session.recipe} remembers is not saved beside it, and a "
            "resumed run would begin without. Write ModelCheckpoint(dirpath=...) to a disk that all workers share"
        )


def load(session: Session, path: str | os.PathLike[str], number: int = 0) -> None:
    """Take up what `save` wrote; every rank calls it. Without it, say so where a checkpoint is there."""
    directory = directory_of(path, number)
    if directory is not None and session.load(directory):
        return
    if os.path.exists(path):
        events.notice(
            f"beside {os.fspath(path)!r} is no directory {os.path.basename(os.fspath(path)) + SUFFIX!r}, so all "
            f"workers go on from the model in it, and {session.recipe} begins with nothing to remember"
        )


def remove(path: str | os.PathLike[str]) -> None:
    """Remove all ranks' parts of a checkpoint, where they are on this machine."""
    directory = directory_of(path)
    if directory is not None:
        shutil.rmtree(os.path.dirname(directory), ignore_errors=True)
