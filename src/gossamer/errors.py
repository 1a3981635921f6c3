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
    """A recipe cannot be parsed, or its terms cannot be combined."""


class AttachError(GossamerError):
    """A model, optimizer or loop is not supported."""


class LayoutError(GossamerError):
    """A tensor differs in shape, dtype or device from the one its state was made for."""


class MismatchError(GossamerError):
    """Ranks have different values that must be equal; the message has both values and their ranks."""


class LoopError(GossamerError):
    """The training loop made calls that the recipe does not support."""


class NonFiniteError(GossamerError):
    """Values were not finite for several consecutive steps."""


class NotFinite(GossamerError):
    """A value cannot be sent, detected while encoding; the aggregation catches it."""


class MalformedError(GossamerError):
    """A payload cannot be decoded; nothing was written."""


class OutOfRange(MalformedError):
    """Finite values of a payload are too large for the sum; an aggregation catches it and skips the step."""


class MemoryShortage(GossamerError, MemoryError):
    """Memory ran out during an exchange; the message has the rank, the tensors and the requested bytes."""


class DeviceError(GossamerError):
    """A GPU, or its driver, failed during an exchange; nothing of the step was committed."""


class PeerLost(GossamerError):
    """A worker left, or its connection broke."""


class RemoteError(GossamerError):
    """The owner of a remote module raised an error; the message has its rank, the error's type and its message."""


class Stopped(SystemExit):
    """Training was asked to end, on every rank after the same step, and its loop continued. Not an error.

    The innermost block catches it, `with session.epoch()` or `with gossamer.attach(...)`; without one it ends the
    script with exit code 0. A loop that checks for it never sees it: `if session.should_stop: break`.
    """


class ConnectError(GossamerError):
    """The workers could not connect to each other."""


class LeftWhileJoining(ConnectError, PeerLost):
    """A worker left before the group of all workers was complete."""


class CoordinatorLost(ConnectError, PeerLost):
    """The coordinator of an elastic run did not answer within the timeout. Restarting the worker does not help."""


class CheckpointError(GossamerError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class StoreError(GossamerError):
    """A run's store is missing, invalid, or was written by a newer version."""


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
    """Raise ValueError with `message` unless `condition` is true."""
    if not condition:
        raise ValueError(message)
