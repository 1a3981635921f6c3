"""Errors. Every message has the cause, the consequence, and the line to write instead."""

from __future__ import annotations

__all__ = [
    "AttachError",
    "CheckpointError",
    "ConnectError",
    "CoordinatorLost",
    "DeviceError",
    "GossamerError",
    "LayoutError",
    "LeftWhileJoining",
    "LoopError",
    "MalformedError",
    "MemoryShortage",
    "MismatchError",
    "NonFiniteError",
    "NotFinite",
    "OutOfRange",
    "PeerLost",
    "RecipeError",
    "RemoteError",
    "Stopped",
    "StoreError",
    "WorkerFailed",
]


class GossamerError(Exception):
    """Base of all errors that this library raises on purpose, except ValueError and TypeError for invalid arguments."""


class RecipeError(GossamerError, ValueError):
    """A recipe cannot be parsed, or its terms cannot be combined. `gossamer recipes` lists the terms."""


class AttachError(GossamerError):
    """A model, optimizer, loop or combination of arguments is not supported."""


class LayoutError(GossamerError):
    """A tensor differs in shape, dtype or device from the one that its state was made for.

    After resizing parameters call session.reset_compressor_state, after adding some session.add_parameters.
    """


class MismatchError(GossamerError):
    """Ranks have different values that must be equal; the message has both values and their ranks.

    Build the same model, with the same recipe and options, on all ranks, and call collectives in the same order.
    """


class LoopError(GossamerError):
    """The training loop made calls that the recipe does not support. The message has the call to make instead."""


class NonFiniteError(GossamerError):
    """Values were not finite for several consecutive steps, which were skipped.

    Lower the learning rate, clip gradients (clip_norm=1.0), or with float16 pass a GradScaler to gossamer.attach.
    """


class NotFinite(GossamerError):
    """A value cannot be sent, detected while encoding. Compressors raise it; the session then skips the step."""


class MalformedError(GossamerError):
    """A payload cannot be decoded; nothing was written."""


class OutOfRange(MalformedError):
    """Finite values of a payload are too large for the sum; an aggregation catches it and skips the step."""


class MemoryShortage(GossamerError, MemoryError):
    """Memory ran out during an exchange; the message has the rank, the tensors and the requested bytes.

    Reduce the batch size, or use a compressor with less temporary memory.
    """


class DeviceError(GossamerError):
    """A GPU, or its driver, failed during an exchange; nothing of the step was committed.

    Resume from the last checkpoint in a new process: gossamer run --max-restarts 1.
    """


class PeerLost(GossamerError):
    """A worker left, or its connection broke.

    Resume from the last checkpoint with the remaining workers, or start an elastic run, which continues without it.
    """


class RemoteError(GossamerError):
    """The owner of a remote module raised an error; the message has its rank, the error's type and its message."""


class Stopped(SystemExit):
    """Training was asked to end, on every rank after the same step, and its loop continued. Not an error.

    The innermost block catches it, `with session.epoch()` or `with gossamer.attach(...)`; without one it ends the
    script with exit code 0. A loop that checks for it never sees it: `if session.should_stop: break`.
    """


class ConnectError(GossamerError):
    """The workers could not connect to each other. The message has the missing ranks or the address that failed."""


class LeftWhileJoining(ConnectError, PeerLost):
    """A worker left before the group of all workers was complete."""


class CoordinatorLost(ConnectError, PeerLost):
    """The coordinator of an elastic run did not answer within the timeout.

    Restarting the worker does not help: run the first launcher's command again, in the same folder.
    """


class CheckpointError(GossamerError):
    """A checkpoint is missing, damaged, or belongs to another run, model or recipe."""


class StoreError(GossamerError):
    """A run's store (run.sqlite) is missing, invalid, or was written by a newer version."""


class WorkerFailed(GossamerError):
    """A worker of gossamer.launch failed; the message has its rank, its error and its traceback.

    Args:
        message: the whole text.
        rank: of the worker that failed first.
        traceback: of the worker, as text; empty if its process was killed.
    """

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.traceback = rank, traceback


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` is true.

    Args:
        condition, message: of an argument; the message has the invalid value and an example of a valid one.

    Example:
        >>> gossamer.extend.require(0 < 0.01 <= 1, "density must be in (0, 1]. Example: TopK(0.01)")
    """
    if not condition:
        raise ValueError(message)
