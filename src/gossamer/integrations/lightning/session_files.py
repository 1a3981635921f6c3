"""Session files: the merged model, and each rank's part of a checkpoint, next to Lightning's file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from gossamer import events
from gossamer.errors import CheckpointError
from gossamer.train.engine.parameter_views import copy_parameters, state_of
from gossamer.train.session.session import Session
from gossamer.train.world_state import current


def agreed_state(session: Session, state_dict: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The result of `state_dict` with the merged parameters. All ranks call it."""
    if not session.recipe.strategy.local_parameters:
        return dict(state_dict())
    with session.averaged_parameters(session.model):
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state_dict().items()}


def close_agreed(session: Session) -> None:
    """Close the session and leave the merged state in each rank's model, so that all ranks evaluate one model."""
    agreed = agreed_state(session, partial(state_of, session.model))
    session.__exit__(None, None, None)
    copy_parameters(agreed, state_of(session.model))


SUFFIX = ".gossamer"


def directory_of(path: str | os.PathLike[str], number: int = 0) -> str | None:
    """The directory of the states of session `number`; None if `path` is not a local file.

    Links to a checkpoint, such as ModelCheckpoint's last.ckpt, are resolved.
    """
    text = os.fspath(path)
    return None if "://" in text else os.path.join(os.path.realpath(text) + SUFFIX, str(number))


def save(session: Session, path: str | os.PathLike[str], number: int = 0, **more: Any) -> None:
    """Write the state for a bit-exact resume: residuals, rounds, random states, parameters and optimizer of each rank.

    All ranks call it. more: state that is also in Lightning's file.
    """
    directory = directory_of(path, number)
    if directory is not None:
        session.save(directory, keep=1, checkpoint=os.path.basename(os.fspath(path)), **more)
    elif current().is_first:
        events.notice(
            f"{os.fspath(path)!r} is not a local path, so the state of {session.recipe} is not saved, and a resumed "
            "run would start without it. Write ModelCheckpoint(dirpath=...) with a disk that all workers share"
        )


def load(session: Session, path: str | os.PathLike[str], number: int = 0, **expected: Any) -> None:
    """Load the state that `save` wrote. All ranks call it. Log a notice if the checkpoint has no such state.

    expected: state in Lightning's file that `save` wrote into `more`, too.

    Raises:
        CheckpointError: the state belongs to another checkpoint that had this name.
    """
    directory = directory_of(path, number)
    if directory is not None and (found := session.load(directory)):
        if other := {name: found[name] for name in expected if found.get(name, expected[name]) != expected[name]}:
            raise CheckpointError(
                f"{directory} is of a checkpoint with {other}, but {os.fspath(path)!r} has {expected}: the process "
                "ended between the two files, or one of them was replaced. Resume from another checkpoint; or delete "
                "that directory, so that all workers start from the model in the checkpoint."
            )
        return
    if os.path.exists(path):
        events.notice(
            f"{os.fspath(path)!r} has no directory {os.path.basename(os.fspath(path)) + SUFFIX!r} next to it, so all "
            f"workers start from the model in the checkpoint, and {session.recipe} starts with empty state"
        )


def remove(path: str | os.PathLike[str]) -> None:
    """Remove the parts of a checkpoint that are on this machine."""
    text = os.fspath(path)
    if "://" not in text:  # of a link, which another machine may not have removed yet, the file keeps its parts
        shutil.rmtree(os.path.abspath(text) + SUFFIX, ignore_errors=True)
