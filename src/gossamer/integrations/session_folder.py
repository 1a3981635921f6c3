"""Session folder: saves and loads a session within a checkpoint that another library writes."""

from __future__ import annotations

import os

from gossamer.errors import CheckpointError
from gossamer.train.session.session import Session

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
