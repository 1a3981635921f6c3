"""Events: frozen records that the library emits and observers subscribe to, without knowing of each other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossamer.core.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    moment: float = field(default_factory=time.perf_counter)  # seconds, of this process's time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Attached(Event):
    """A session begins. Emitted before anything is sent, so a listener may still stop it by raising."""

    recipe: str  # the resolved recipe's text
    layouts: tuple[tuple[str, Layout], ...]  # by bucket, with its dtype's name
    parameters: int
    buffer_bytes: int  # broadcast by rank 0 in each step, so that buffers such as BatchNorm statistics agree
    control_bytes: int  # payload of the report that ends a round
    rank: int
    world: int
    fragments: tuple[int, ...] = ()  # by bucket
    rider_bytes: tuple[int, ...] = ()  # by fragment, of the state averaged along with parameters
    period: int = 1  # steps after which the schedule repeats itself
    site_control_bytes: int = 0  # payload of the report within a site in each step


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """One step was committed or skipped. Seconds and bytes are of this worker."""

    step: int
    seconds: float  # since the previous step ended
    waiting_seconds: float = 0.0  # the training thread's, for the communication thread
    encode_seconds: float = 0.0  # of the communication thread, hidden behind computing or not
    wire_seconds: float = 0.0  # likewise
    decode_seconds: float = 0.0  # likewise
    bytes_sent: float = 0.0  # payload
    bytes_pulled: float = 0.0  # payload, from parameter servers
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """A step was skipped on every rank because a gradient was not finite."""

    step: int
    rank: int | None  # None: each rank's was finite, and their mean left the range of the format in which it travels
    tensor: str
    scaled: bool = False  # a GradScaler knows of it, and finds its scale this way


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """The training loop reported metrics after `step` steps."""

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
    """From now on, means of so many bytes go by this collective. Emitted by the communication thread."""

    nbytes: int
    collective: str


@dataclass(frozen=True, kw_only=True)
class ServersTold(Event):
    """Counts of contributions at the end, from the parameter server shard that knows most."""

    applied: int
    late: int  # dropped
    staleness: Mapping[int, int]  # how many had which age, in versions


@dataclass(frozen=True, kw_only=True)
class Closed(Event):
    """A session ended."""

    steps: int
    digest: str  # of the parameters that the recipe merges; equal digests mean equal bits
    residual_bytes: int
    bucket_bytes: int
    holds_merged: bool = True  # whether this worker's own model is what was merged


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
    """Tell the user something in one sentence: by an event, or in the log while nothing listens."""
    emit(Noticed(message=message))
    if not _listeners:
        logging.getLogger("gossamer").warning(message)
