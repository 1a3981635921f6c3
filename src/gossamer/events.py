"""Frozen records of what happened, and the one place to listen for them.

The library emits; observers subscribe. Nothing below the observers knows whether anybody listens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossamer.core.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Event:
    """`moment` is time.perf_counter() of this process, in seconds."""

    moment: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, kw_only=True)
class Attached(Event):
    """A session begins. Emitted before anything is sent, so a listener may still stop it by raising.

    layouts: one per bucket, with its dtype's name; fragments: whose turn each bucket takes; recipe: the resolved
    recipe's text; buffer_bytes: what rank 0 sends along each step so that buffers such as BatchNorm statistics agree;
    rider_bytes: by fragment, what is averaged along with parameters instead; control_bytes: payload of the last word;
    site_control_bytes: of the one within a site in each step; period: after how many steps the schedule repeats itself.
    """

    recipe: str
    layouts: tuple[tuple[str, Layout], ...]
    parameters: int
    buffer_bytes: int
    control_bytes: int
    rank: int
    world: int
    fragments: tuple[int, ...] = ()
    rider_bytes: tuple[int, ...] = ()
    period: int = 1
    site_control_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """One exchange was committed or skipped. Seconds are of this worker.

    seconds: since the previous exchange ended; waiting: the training thread's wait for the lane; encode, wire, decode:
    spent on the lane, hidden behind computing or not; bytes_sent: payload bytes of this worker; bytes_pulled: payload
    bytes that it had from parameter servers.
    """

    step: int
    seconds: float
    waiting_seconds: float = 0.0
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0
    bytes_sent: float = 0.0
    bytes_pulled: float = 0.0
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """A step was skipped on every rank because a gradient was not finite: whose, and in which tensor.

    rank is None where every rank's was finite and their mean left the range of the format in which it travels; scaled:
    a GradScaler knows of it, and finds its scale this way.
    """

    step: int
    rank: int | None
    tensor: str
    scaled: bool = False


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """The training loop reported metrics after `step` exchanges."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    """Something the user should know, in one sentence."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint became complete."""

    step: int
    directory: str


@dataclass(frozen=True, kw_only=True)
class CollectivePicked(Event):
    """From now on, means of so many bytes take this way. Emitted by the thread that talks."""

    nbytes: int
    collective: str


@dataclass(frozen=True, kw_only=True)
class ServersTold(Event):
    """What parameter servers say at the end, of the shard that knows most: how many contributions were applied, how
    many came too late, and how many had which age, in versions."""

    applied: int
    late: int
    staleness: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class Closed(Event):
    """A session ended. digest: of what the recipe merges (the parameters); equal digests mean equal bits.

    holds_merged: this worker's own model is what was merged, and not what it made of it since.
    """

    steps: int
    digest: str
    residual_bytes: int
    bucket_bytes: int
    holds_merged: bool = True


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every event from now on; returns the function that ends it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def emit(event: Event) -> None:
    for listener in tuple(_listeners):
        listener(event)


def notice(message: str) -> None:
    """Tell the user something in one sentence: to whoever listens, else to the log."""
    emit(Noticed(message=message))
    if not _listeners:
        logging.getLogger("gossamer").warning(message)
