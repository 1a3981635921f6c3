"""Errors. Every message says what happened, why it matters, and the line to write instead."""

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
]


class GossamerError(Exception):
    """Base of all errors that this library raises on purpose, except plain wrong arguments."""


class RecipeError(GossamerError, ValueError):
    """A recipe that cannot be read, or parts of one that do not go together."""


class AttachError(GossamerError):
    """A model, optimizer or loop that cannot be served as it is."""


class LayoutError(GossamerError):
    """A tensor is not what it was when its state was made."""


class MismatchError(GossamerError):
    """Ranks that should be alike are not; names both values and the ranks that hold them."""


class LoopError(GossamerError):
    """The training loop did something the recipe cannot honour."""


class NonFiniteError(GossamerError):
    """Numbers were not finite for several steps in a row."""


class NotFinite(GossamerError):
    """A number that cannot be sent, found where it would have been encoded; the aggregation catches it."""


class MalformedError(GossamerError):
    """A payload that cannot be decoded; nothing was written."""


class OutOfRange(MalformedError):
    """A payload of finite numbers that are too large to be added up; an aggregation catches it and skips the step."""


class MemoryShortage(GossamerError, MemoryError):
    """Memory ran out while a step was exchanged; names the rank, the tensors and how much was asked for."""


class DeviceError(GossamerError):
    """A GPU, or its driver, failed while a step was exchanged; nothing of it was committed."""


class PeerLost(GossamerError):
    """A worker left, or its link broke."""


class RemoteError(GossamerError):
    """A remote module's owner raised an error; names its rank, the error's type and its message."""


class Stopped(SystemExit):
    """Not an error: training was asked to end, on every rank after the same step, and its loop went on.

    The innermost block ends it, `with session.epoch()` or `with gossamer.attach(...)`; without one it ends the script,
    whoever launched that, with exit code 0. A loop that ends itself never sees it: `if session.should_stop: break`.
    """


class ConnectError(GossamerError):
    """The workers could not find each other."""


class LeftWhileJoining(ConnectError, PeerLost):
    """A worker left before the group of all stood."""


class CoordinatorLost(ConnectError, PeerLost):
    """The coordinator of an elastic run did not answer for the stated time. Restarts of the worker do not help."""


class CheckpointError(GossamerError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class StoreError(GossamerError):
    """A run's store that is missing, is none, or was written by a newer version."""


def require(condition: bool, message: str) -> None:
    """Check a hyperparameter once, at construction."""
    if not condition:
        raise ValueError(message)
