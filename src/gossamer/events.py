"""Events: frozen records that the library emits and observers subscribe to."""

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

Ended = Literal["finished", "failed", "interrupted"]  # the outcome of a run
RecordOption = str | os.PathLike[str] | Literal[False] | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    moment: float = field(default_factory=time.perf_counter)  # seconds, of this process's time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """This worker has joined the group of all workers."""


@dataclass(frozen=True, kw_only=True)
class WithoutSession(Event):
    """This worker communicates by Gossamer without gossamer.attach. Emitted once per means of communication."""

    trains: bool  # by remote modules, pipeline boundaries or a DDP hook, which need no session


@dataclass(frozen=True, kw_only=True)
class Attached(Event):
    """A session begins. Emitted before anything is sent, so a listener may still prevent it by raising."""

    recipe: str  # the resolved recipe's text
    layouts: tuple[tuple[str, Layout], ...]  # by bucket, with its dtype's name
    parameters: int
    buffer_bytes: int  # broadcast by rank 0 in each step, so that buffers such as BatchNorm statistics are equal
    control_bytes: int  # payload of the report at the end of a round
    rank: int
    world: int
    fragments: tuple[int, ...] = ()  # by bucket
    rider_bytes: tuple[float, ...] = ()  # by fragment, of the state averaged with parameters, mean per round
    period: int = 1  # steps after which the schedule repeats
    site_control_bytes: int = 0  # payload of the report within a site in each step
    buffers: tuple[int, ...] = ()  # bytes of each of the buffers in `buffer_bytes`


@dataclass(frozen=True, kw_only=True)
class LeftRun(Event):
    """This worker has left an elastic run that continues without it: evicted, or asked to end. Not an error."""


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """One step was committed or skipped. Seconds and bytes are of this worker."""

    step: int
    seconds: float  # since the previous step ended
    waiting_seconds: float = 0.0  # training thread waits for the communication thread
    encode_seconds: float = 0.0  # of the communication thread, including time that overlaps with computing
    wire_seconds: float = 0.0  # the same, waiting for other workers
    decode_seconds: float = 0.0  # the same
    data_seconds: float = 0.0  # from the last step's end to this step's first forward pass
    bytes_sent: float = 0.0  # payload
    bytes_pulled: float = 0.0  # payload, from parameter servers
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """A step was skipped on every rank because a gradient was not finite."""

    step: int
    rank: int | None  # None: each rank's was finite, and their mean exceeded the range of the format it was sent in
    tensor: str
    scaled: bool = False  # a GradScaler handles it, and adapts its scale
    batch: int | None = None  # of `rank`, known only there: the number of its batch in the epoch, from 0


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """The training loop reported metrics after `step` steps."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    """A message for the user, in one sentence."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """This worker has waited long for others that are connected and silent.

    Emitted once per silence, by each waiting worker.
    """

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
    """After `step` steps the session continues with another recipe, on all ranks."""

    step: int
    before: str  # the resolved recipes' texts
    after: str
    reason: str = ""  # given by the caller
    bytes_sent: float = 0.0  # payload, to equalize the parameters of all ranks and transfer their residuals


@dataclass(frozen=True, kw_only=True)
class CollectivePicked(Event):
    """From now on, means of this size use this collective. Emitted by the communication thread."""

    nbytes: int
    collective: str
    world: int = 0  # workers of the mean; 0: unknown


@dataclass(frozen=True)
class LinkCounters:
    """The kernel's counters of a connection to another worker, since it was opened."""

    round_trip_seconds: float  # smoothed; includes queueing delay
    acknowledged_bytes: int  # sent and acknowledged, counted once; with TLS and message headers, without TCP's and IP's
    retransmits: int  # segments
    busy_seconds: float  # with data to send or to be acknowledged, and room in the receive window
    flight_bytes_per_second: float  # of the latest acknowledged flight; 0 if the kernel does not report it
    limited: bool  # whether that flight was limited by the application, so that the connection may be faster


@dataclass(frozen=True, kw_only=True)
class LinksOpened(Event):
    """This worker's connections to others are open. Peers are named by process: "HOST PID" or "HOST PID RANK".

    round_trips: seconds, bytes_per_second: capacity of both ends' interfaces, when the group began; by peer.
    """

    round_trips: Mapping[str, float]
    bytes_per_second: Mapping[str, float]
    read: Callable[[], Mapping[str, LinkCounters]]  # current values, from any thread; the last ones after closing
    is_open: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class GroupChanged(Event):
    """Workers of an elastic run were lost, or new ones admitted. Emitted by the communication thread."""

    step: int  # the last one that all have made
    view: int
    world: int  # current number of workers
    lost: tuple[int, ...]  # former ranks of the lost workers
    joined: int
    seconds: float  # from detection by this worker until the new group was ready
    finished: bool  # whether the interrupted exchange was completed; otherwise it was repeated


@dataclass(frozen=True, kw_only=True)
class ResidualTold(Event):
    """The residual of this worker of an elastic run after `step` steps, which would be lost with it.

    Emitted every few seconds by the communication thread.
    """

    step: int
    norm: float  # of all residuals of compressors


@dataclass(frozen=True, kw_only=True)
class TensorCost:
    """The cost of one tensor on this worker; None where unknown. The definitions are in train/engine/tensor_sampler."""

    name: str
    numel: int
    bytes: float | None  # payload of one exchange, its part of the bucket's
    residual_norm: float | None
    gradient_norm: float | None  # of this worker's input
    energy_share: float | None  # fraction of the input plus residual that was sent immediately


@dataclass(frozen=True, kw_only=True)
class TensorsTold(Event):
    """The costs of the tensors of one bucket after `step` steps. A sample; emitted by the communication thread."""

    step: int
    tensors: tuple[TensorCost, ...]


@dataclass(frozen=True, kw_only=True)
class Parted(Event):
    """Ranks in lock step have different parameters. Emitted by the first of them."""

    when: str
    tensor: str  # the first that differs
    held: tuple[tuple[str, tuple[int, ...]], ...]  # its (checksum, ranks), those of most ranks first
    agreed: int | None  # the last step at which it was equal; None: not since attach


@dataclass(frozen=True, kw_only=True)
class ServersTold(Event):
    """Counts of contributions at the end, from the parameter server shard with the most complete counts."""

    applied: int
    late: int  # dropped
    staleness: Mapping[int, int]  # number of contributions by age in versions


@dataclass(frozen=True, kw_only=True)
class Closed(Event):
    """A session ended."""

    steps: int
    digest: str  # of the model's state_dict() as merged by the recipe; equal digests mean equal bits
    residual_bytes: int
    bucket_bytes: int
    holds_merged: bool = True  # whether this worker's own model has the merged parameters
    agrees: bool | None = None  # with ranks on other machines; None: a single machine, or no report from them
    differing: Mapping[str, object] | None = None  # the tensor that differs, if machines were compared
    tensors: Mapping[str, str] = field(
        default_factory=dict
    )  # a hash of each of its tensors, by name; empty in a world of one
    ended: Ended = "finished"


@dataclass(frozen=True, kw_only=True)
class AttachRequest:
    """The arguments of `attach` for reporting, before the session exists. Not an event."""

    record: RecordOption
    log_to: Iterable[str]
    rank: int
    local_rank: int
    world: int
    is_first: bool  # whether this worker prints and writes for all


Listener = Callable[[Event], None]
# Removed from notices, which may quote other machines: all control characters except line feed and tab
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})

_listeners: list[Listener] = []
_silent: list[Listener] = []  # those of them that do not show notices
_samplers: list[Listener] = []  # those of them that take samples
_stepless: list[Listener] = []  # those of them that are not called with StepEnded
_begin_reports: Callable[[AttachRequest], str] | None = None


def subscribe(
    listener: Listener, *, shows_notices: bool = True, takes_samples: bool = False, takes_steps: bool = True
) -> Callable[[], None]:
    """Call `listener` with every event from now on.

    Args:
        listener: a function of one event. It runs in the emitting thread.
        shows_notices: whether it shows notices to the user; otherwise they are logged.
        takes_samples: whether it uses TensorsTold, which takes time to measure.
        takes_steps: whether it uses StepEnded, which is emitted in every step; if not, it is not called with it.

    Returns:
        A function that ends the subscription.
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
    """Call `begin` before each session is attached, instead of the function given before.

    begin: subscribes the listeners of one session, and returns the path of its record, or "". It may raise AttachError.
    """
    global _begin_reports
    _begin_reports = begin


def begin_reports(request: AttachRequest) -> str:
    """Start reporting the session that is about to be attached. Returns the path of its record, or ""."""
    return "" if _begin_reports is None else _begin_reports(request)


def _unsubscribe(listener: Listener) -> None:
    _listeners.remove(listener)
    for some in (_silent, _samplers, _stepless):
        if listener in some:
            some.remove(listener)


def observed() -> bool:
    """Whether any listener is subscribed, such as the recorder of `gossamer run`."""
    return bool(_listeners)


def sampled() -> bool:
    """Whether any listener takes samples of tensors."""
    return bool(_samplers)


def ended_by(kind: type[BaseException] | None) -> Ended:
    """Return the outcome of a run that ended with an exception of this kind, or without one."""
    if kind is None or issubclass(kind, Stopped):
        return "finished"
    return "interrupted" if issubclass(kind, KeyboardInterrupt | SystemExit) else "failed"


def emit(event: Event) -> None:
    left_out = _stepless if isinstance(event, StepEnded) else ()
    for listener in tuple(_listeners):
        if listener not in left_out:
            listener(event)


def notice(message: str) -> None:
    """Show the user a message in one sentence: by an event, or in the log if no listener shows it."""
    message = message.translate(CONTROLS)
    emit(Noticed(message=message))
    if all(listener in _silent for listener in _listeners):
        logging.getLogger("gossamer").warning(message)
