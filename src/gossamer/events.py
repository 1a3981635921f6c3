"""Events: frozen records that the library emits and observers subscribe to, without knowing of each other."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from gossamer.errors import Stopped

if TYPE_CHECKING:
    from gossamer.base.layout import Layout  # which imports torch

__all__ = [
    "Attached",
    "Closed",
    "CollectivePicked",
    "Ended",
    "Event",
    "GroupChanged",
    "Joined",
    "LeftRun",
    "LinkCounters",
    "LinksOpened",
    "Listener",
    "Logged",
    "Noticed",
    "Parted",
    "RecipeSwitched",
    "ResidualTold",
    "Saved",
    "ServersTold",
    "Skipped",
    "Stalled",
    "StepEnded",
    "TensorCost",
    "TensorsTold",
    "WithoutSession",
    "subscribe",
]

Ended = Literal["finished", "failed", "interrupted"]  # how a run did
RecordOption = str | os.PathLike[str] | Literal[False] | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    moment: float = field(default_factory=time.perf_counter)  # seconds, of this process's time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """This worker is in the group of all."""


@dataclass(frozen=True, kw_only=True)
class WithoutSession(Event):
    """This worker communicates by Gossamer, and has not called gossamer.attach. Emitted once for each such means."""

    trains: bool  # by remote modules, pipeline boundaries or a hook of DDP, which need no session


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
    rider_bytes: tuple[float, ...] = ()  # by fragment, of the state averaged along with parameters, on average
    period: int = 1  # steps after which the schedule repeats itself
    site_control_bytes: int = 0  # payload of the report within a site in each step
    buffers: tuple[int, ...] = ()  # bytes of each of the buffers in `buffer_bytes`


@dataclass(frozen=True, kw_only=True)
class LeftRun(Event):
    """This worker has left an elastic run that goes on without it: put out, or asked alone to end. No error."""


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """One step was committed or skipped. Seconds and bytes are of this worker."""

    step: int
    seconds: float  # since the previous step ended
    waiting_seconds: float = 0.0  # the training thread's, for the communication thread
    encode_seconds: float = 0.0  # of the communication thread, hidden behind computing or not
    wire_seconds: float = 0.0  # likewise
    decode_seconds: float = 0.0  # likewise
    data_seconds: float = 0.0  # from the last step's end to this one's first forward pass
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
    batch: int | None = None  # of `rank`, known there alone: its batch's number, from 0, since the epoch began


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
class Stalled(Event):
    """This worker has waited long for others that are connected and silent. Once a silence, by whoever waits."""

    rank: int
    seconds: float
    waits_for: tuple[int, ...]  # ranks


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint became complete."""

    step: int
    directory: str


@dataclass(frozen=True, kw_only=True)
class RecipeSwitched(Event):
    """After `step` steps the session goes on with another recipe, on all ranks."""

    step: int
    before: str  # the resolved recipes' texts
    after: str
    reason: str = ""  # of whoever asked for it
    bytes_sent: float = 0.0  # payload, by which all ranks came to the same parameters and handed on what they owed


@dataclass(frozen=True, kw_only=True)
class CollectivePicked(Event):
    """From now on, means of so many bytes go by this collective. Emitted by the communication thread."""

    nbytes: int
    collective: str
    world: int = 0  # workers whose mean it is; 0: not told


@dataclass(frozen=True)
class LinkCounters:
    """What the kernel knows of a connection to another worker. Sums count since it was opened."""

    round_trip_seconds: float  # smoothed; queues on the way are part of it
    acknowledged_bytes: int  # sent and acknowledged, once each; TLS and message headers included, TCP's and IP's not
    retransmits: int  # segments sent again
    busy_seconds: float  # in which something was to be sent or acknowledged, and the receiver had room for it
    flight_bytes_per_second: float  # of the latest flight that was acknowledged; 0 where the kernel does not say
    limited: bool  # whether that flight ended for want of data, so that the connection may be faster


@dataclass(frozen=True, kw_only=True)
class LinksOpened(Event):
    """This worker's own connections to others stand. Peers are named by process: "HOST PID" or "HOST PID RANK".

    round_trips: seconds, bytes_per_second: what both ends' lines allow, as the group began; by peer.
    """

    round_trips: Mapping[str, float]
    bytes_per_second: Mapping[str, float]
    read: Callable[[], Mapping[str, LinkCounters]]  # now, from any thread; the last numbers once they are closed
    is_open: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class GroupChanged(Event):
    """Workers of an elastic run were lost, or newcomers let in. Emitted by the communication thread."""

    step: int  # the last one that all have made
    view: int
    world: int  # workers, now
    lost: tuple[int, ...]  # ranks before of those that are gone
    joined: int
    seconds: float  # from when this worker noticed until the group stood
    finished: bool  # whether the exchange that broke was finished, or else made again


@dataclass(frozen=True, kw_only=True)
class ResidualTold(Event):
    """What this worker of an elastic run had still to send after `step` steps, which would be lost with it. Told every
    few seconds; emitted by the communication thread."""

    step: int
    norm: float  # of all that compressors keep for later


@dataclass(frozen=True, kw_only=True)
class TensorCost:
    """What one tensor costs on this worker; None where it is not known. The law is in train/engine/tensor_sampler."""

    name: str
    numel: int
    bytes: float | None  # payload of one exchange, its part of the bucket's
    residual_norm: float | None  # of what is kept for later
    gradient_norm: float | None  # of what this worker gives
    energy_share: float | None  # of what was wanted, that went at once


@dataclass(frozen=True, kw_only=True)
class TensorsTold(Event):
    """What the tensors of one bucket cost, after `step` steps. A sample; emitted by the communication thread."""

    step: int
    tensors: tuple[TensorCost, ...]


@dataclass(frozen=True, kw_only=True)
class Parted(Event):
    """Ranks in lock step were found to have different parameters. Emitted by the first of them."""

    when: str
    tensor: str  # the first that differs
    held: tuple[tuple[str, tuple[int, ...]], ...]  # (checksum, ranks) of it, those of most ranks first
    agreed: int | None  # the last step at which it was seen alike; None: not since attach


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
    digest: str  # of the model's state_dict() as the recipe merges it; equal digests mean equal bits
    residual_bytes: int
    bucket_bytes: int
    holds_merged: bool = True  # whether this worker's own model is what was merged
    agrees: bool | None = None  # with ranks on other machines; None: of one machine only, or they did not tell
    differing: Mapping[str, object] | None = None  # which tensor differs, where it was compared between machines
    tensors: Mapping[str, str] = field(
        default_factory=dict
    )  # a hash of each tensor of it, by name; empty in a world of one
    ended: Ended = "finished"


@dataclass(frozen=True, kw_only=True)
class AttachRequest:
    """The arguments of `attach` that say how the session is reported, before there is a session. No event."""

    record: RecordOption
    log_to: Iterable[str]
    rank: int
    local_rank: int
    world: int
    is_first: bool  # whether this worker prints and writes for all


Listener = Callable[[Event], None]
# Left out of notices, which may quote other machines: all control characters but the end of a line and the tabulator
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})

_listeners: list[Listener] = []
_silent: list[Listener] = []  # those of them that show no notice
_samplers: list[Listener] = []  # those of them that take samples
_stepless: list[Listener] = []  # those of them that are not called with steps
_begin_reports: Callable[[AttachRequest], str] | None = None


def subscribe(
    listener: Listener, *, shows_notices: bool = True, takes_samples: bool = False, takes_steps: bool = True
) -> Callable[[], None]:
    """Call `listener` with every event from now on; returns the function that ends it.

    shows_notices: whether it brings notices before the user, who else finds them in the log. takes_samples: whether it
    has a use for TensorsTold, which takes time to measure. takes_steps: whether it has a use for StepEnded, which comes
    with every step; else it is not called with it.
    """
    _listeners.append(listener)
    if takes_samples:
        _samplers.append(listener)
    if not shows_notices:
        _silent.append(listener)
    if not takes_steps:
        _stepless.append(listener)
    return partial(_unsubscribe, listener)


def report_sessions(begin: Callable[[AttachRequest], str]) -> None:
    """Call `begin` before each session is attached, in place of the function that was given before.

    begin: subscribes the listeners of one session, and returns the path of its record, or "". It may raise AttachError.
    """
    global _begin_reports
    _begin_reports = begin


def begin_reports(request: AttachRequest) -> str:
    """Begin to report the session that is about to be attached. Returns the path of its record, or ""."""
    return "" if _begin_reports is None else _begin_reports(request)


def _unsubscribe(listener: Listener) -> None:
    _listeners.remove(listener)
    for some in (_silent, _samplers, _stepless):
        if listener in some:
            some.remove(listener)


def observed() -> bool:
    """Whether anything listens, such as the recorder of `gossamer run`."""
    return bool(_listeners)


def sampled() -> bool:
    """Whether anything takes samples of tensors."""
    return bool(_samplers)


def ended_by(kind: type[BaseException] | None) -> Ended:
    """How a run did that an exception of this kind has left, or none."""
    if kind is None or issubclass(kind, Stopped):
        return "finished"
    return "interrupted" if issubclass(kind, KeyboardInterrupt | SystemExit) else "failed"


def emit(event: Event) -> None:
    left_out = _stepless if isinstance(event, StepEnded) else ()
    for listener in tuple(_listeners):
        if listener not in left_out:
            listener(event)


def notice(message: str) -> None:
    """Tell the user something in one sentence: by an event, or in the log while nothing that listens shows it."""
    message = message.translate(CONTROLS)
    emit(Noticed(message=message))
    if all(listener in _silent for listener in _listeners):
        logging.getLogger("gossamer").warning(message)
