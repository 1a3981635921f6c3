"""Events: frozen records that the library emits and observers subscribe to."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gossamer.base.former_names import warn_former_name
from gossamer.errors import Stopped

if TYPE_CHECKING:
    from gossamer.base.layout import Layout  # which imports torch

__all__ = [
    "Attached",
    "Closed",
    "CollectivePicked",
    "ContributionsCounted",
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
    "ParametersDiffer",
    "RecipeSwitched",
    "ResidualMeasured",
    "Saved",
    "SharesChanged",
    "Skipped",
    "Stalled",
    "StepEnded",
    "TensorCost",
    "TensorsMeasured",
    "WithoutSession",
    "subscribe",
]

Ended = Literal["finished", "failed", "interrupted"]  # the outcome of a run
RecordOption = str | os.PathLike[str] | Literal[False] | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `subscribe` has an example of a listener.

    Attributes:
        moment: time of the event in seconds, by this process's time.perf_counter().
    """

    moment: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """This worker has joined the group of all workers."""


@dataclass(frozen=True, kw_only=True)
class WithoutSession(Event):
    """This worker communicates by Gossamer without gossamer.attach. Emitted once per means of communication.

    Attributes:
        trains: whether it trains by remote modules, pipeline boundaries or a DDP hook, which need no session.
    """

    trains: bool


@dataclass(frozen=True, kw_only=True)
class Attached(Event):
    """A session begins. Emitted before anything is sent, so a listener may still prevent it by raising.

    Attributes:
        recipe: text of the resolved recipe.
        layouts: the (dtype name, layout) of each bucket.
        parameters: number of elements of the model's parameters, or of all layouts without a model.
        buffer_bytes: bytes of buffers, such as BatchNorm statistics, broadcast per step by the first rank with data.
        control_bytes: payload of the report at the end of a round, in bytes.
        rank: this worker's rank.
        world: number of workers.
        fragments: the number of the fragment of each bucket.
        rider_bytes: per fragment, the mean bytes per round of values averaged with parameters: optimizer state, in the
            first fragment buffers, and with averaging="radial" a norm per tensor.
        period: steps after which the schedule repeats.
        site_control_bytes: payload of the report within a site in each step, in bytes.
        buffers: bytes of each buffer of `buffer_bytes`.
        steps: optimizer steps of the training; None: unknown.
    """

    recipe: str
    layouts: tuple[tuple[str, Layout], ...]
    parameters: int
    buffer_bytes: int
    control_bytes: int
    rank: int
    world: int
    fragments: tuple[int, ...] = ()
    rider_bytes: tuple[float, ...] = ()
    period: int = 1
    site_control_bytes: int = 0
    buffers: tuple[int, ...] = ()
    steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class LeftRun(Event):
    """This worker has left an elastic run that continues without it: evicted, or asked to end. Not an error."""


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """One step was committed or skipped. Seconds and bytes are of this worker.

    Attributes:
        step: value of session.steps.
        seconds: time since the previous step ended.
        waiting_seconds: time in which the training thread waited for the communication thread.
        encode_seconds: time in which the communication thread encoded, including overlap with computation.
        wire_seconds: time in which the communication thread waited for other workers.
        decode_seconds: time in which the communication thread decoded.
        data_seconds: time from the last step's end to this step's first forward pass.
        bytes_sent: payload that this worker sent.
        bytes_pulled: payload that it received from parameter servers.
        skipped: whether a value was not finite, so that no rank made the step.
    """

    step: int
    seconds: float
    waiting_seconds: float = 0.0
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0
    data_seconds: float = 0.0
    bytes_sent: float = 0.0
    bytes_pulled: float = 0.0
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """A step was skipped on every rank because a gradient was not finite.

    Attributes:
        step: value of session.steps.
        rank: the first rank with a value that was not finite. None: each rank's gradient was finite, and their mean
            exceeded the range of its format.
        tensor: name of the first tensor that was not finite.
        scaled: whether a GradScaler handles it and adapts its scale.
        batch: number of the batch in the epoch, from 0; known only on `rank`.
    """

    step: int
    rank: int | None
    tensor: str
    scaled: bool = False
    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """The training loop reported metrics after `step` steps.

    Attributes:
        step: number of steps.
        values: metrics by name.
    """

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    """A message for the user, in one sentence.

    Attributes:
        message: the sentence.
    """

    message: str


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """This worker has waited long for others that are connected and silent.

    Emitted once per silence, by each waiting worker.

    Attributes:
        rank: this worker's rank.
        seconds: duration of the wait.
        waits_for: ranks that it waits for.
    """

    rank: int
    seconds: float
    waits_for: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint became complete.

    Attributes:
        step: number of steps.
        directory: the argument of session.save.
    """

    step: int
    directory: str


@dataclass(frozen=True, kw_only=True)
class RecipeSwitched(Event):
    """After `step` steps the session continues with another recipe, on all ranks.

    Attributes:
        step: number of steps.
        before: text of the resolved recipe.
        after: text of the new recipe, resolved.
        reason: text given by the caller.
        bytes_sent: payload to equalize the parameters of all ranks and transfer their residuals.
        period: steps between two rounds of the new recipe.
    """

    step: int
    before: str
    after: str
    reason: str = ""
    bytes_sent: float = 0.0
    period: int = 1


@dataclass(frozen=True, kw_only=True)
class SharesChanged(Event):
    """Workers that divide the work by speed have other shares, which are equal on all ranks.

    Attributes:
        step: value of session.steps after which they apply.
        shares: by rank, backward passes or samples of a step, or local steps per period.
    """

    step: int
    shares: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CollectivePicked(Event):
    """From now on, means of this size use this collective. Emitted by the communication thread.

    Attributes:
        nbytes: size of the tensors in bytes.
        collective: name of the algorithm.
        world: number of workers of the mean; 0 if unknown.
    """

    nbytes: int
    collective: str
    world: int = 0


@dataclass(frozen=True)
class LinkCounters:
    """The kernel's counters of a connection to another worker, since it was opened.

    Attributes:
        round_trip_seconds: smoothed round trip, including queueing delay.
        acknowledged_bytes: bytes sent and acknowledged, counted once; with TLS and message headers, without headers of
            TCP and IP.
        retransmits: number of segments that were sent again.
        busy_seconds: time with data to send or to be acknowledged, and room in the receive window.
        flight_bytes_per_second: rate of the latest acknowledged flight; 0 if the kernel does not report it.
        limited: whether that flight was limited by the application, so that the connection may be faster.
    """

    round_trip_seconds: float
    acknowledged_bytes: int
    retransmits: int
    busy_seconds: float
    flight_bytes_per_second: float
    limited: bool


@dataclass(frozen=True, kw_only=True)
class LinksOpened(Event):
    """This worker's connections to others are open. Peers are named by process: "HOST PID" or "HOST PID RANK".

    Attributes:
        round_trips: round trip in seconds to each peer when the group began.
        bytes_per_second: capacity of the slower interface of both ends, for each peer.
        read: returns current values, from any thread; the last values after closing.
        is_open: returns whether the connections are still open.
        relays: the worker on the machine that relays the connection, for each relayed peer; "" if it has no worker.
    """

    round_trips: Mapping[str, float]
    bytes_per_second: Mapping[str, float]
    read: Callable[[], Mapping[str, LinkCounters]]
    is_open: Callable[[], bool]
    relays: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GroupChanged(Event):
    """Workers of an elastic run were lost, or new ones admitted. Emitted by the communication thread.

    Attributes:
        step: the last step that all workers have made.
        view: number of the group.
        world: current number of workers.
        lost: former ranks of the lost workers.
        joined: number of new workers.
        seconds: from detection by this worker until the new group was ready.
        finished: whether the interrupted exchange was completed; otherwise it was repeated.
    """

    step: int
    view: int
    world: int
    lost: tuple[int, ...]
    joined: int
    seconds: float
    finished: bool


@dataclass(frozen=True, kw_only=True)
class ResidualMeasured(Event):
    """The residual of this worker of an elastic run after `step` steps, which would be lost with it.

    Emitted every few seconds by the communication thread.

    Attributes:
        step: number of steps.
        norm: L2 norm of all residuals of compressors.
    """

    step: int
    norm: float


@dataclass(frozen=True, kw_only=True)
class TensorCost:
    """The cost of one tensor on this worker; None where unknown. The definitions are in train/engine/tensor_sampler.

    Attributes:
        name: name of the parameter.
        numel: number of elements.
        bytes: this tensor's part of the bucket's payload in one exchange.
        residual_norm: L2 norm of this worker's residual.
        gradient_norm: L2 norm of this worker's input.
        energy_share: fraction of the energy of the input plus residual that was sent immediately.
    """

    name: str
    numel: int
    bytes: float | None
    residual_norm: float | None
    gradient_norm: float | None
    energy_share: float | None


@dataclass(frozen=True, kw_only=True)
class TensorsMeasured(Event):
    """The costs of the tensors of one bucket after `step` steps. A sample; emitted by the communication thread.

    Attributes:
        step: number of steps.
        tensors: one per tensor of the bucket.
    """

    step: int
    tensors: tuple[TensorCost, ...]


@dataclass(frozen=True, kw_only=True)
class ParametersDiffer(Event):
    """Ranks in lock step have different parameters. Emitted by the first of them.

    Attributes:
        when: time of the comparison, such as "at step 100".
        tensor: name of the first tensor that differs.
        held: its checksums, each with the ranks that have it; the most frequent checksum first.
        agreed: the last step at which it was equal; None if it never was since attach.
    """

    when: str
    tensor: str
    held: tuple[tuple[str, tuple[int, ...]], ...]
    agreed: int | None


@dataclass(frozen=True, kw_only=True)
class ContributionsCounted(Event):
    """Counts of contributions at the end, from the parameter server shard with the most complete counts.

    Attributes:
        applied: number of contributions that were applied.
        late: number of contributions that were dropped because they were late.
        staleness: number of contributions by age in versions.
        samples: sum of the weights of applied contributions: without set_batch_weight, backward passes.
    """

    applied: int
    late: int
    staleness: Mapping[int, int]
    samples: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Closed(Event):
    """A session ended.

    Attributes:
        steps: number of steps.
        digest: hash of the model's state_dict() as merged by the recipe; equal digests mean equal bits.
        residual_bytes: bytes of the values that this worker's compressors have still to send.
        bucket_bytes: bytes of all buckets.
        holds_merged: whether this worker's own model has the merged parameters.
        agrees: whether it agrees with ranks on other machines; None: a single machine, or no report from them.
        differing: the tensor that differs between machines.
        tensors: a hash of each of its tensors, by name; empty in a world of one.
        changed_frozen: names of parameters with requires_grad=False that changed since attach; empty in a world of one.
        ended: "finished", "failed" or "interrupted".
    """

    steps: int
    digest: str
    residual_bytes: int
    bucket_bytes: int
    holds_merged: bool = True
    agrees: bool | None = None
    differing: Mapping[str, object] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    changed_frozen: Sequence[str] = ()
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


_FORMER = {
    "Parted": ParametersDiffer,
    "ResidualTold": ResidualMeasured,
    "ServersTold": ContributionsCounted,
    "TensorsTold": TensorsMeasured,
}


def __getattr__(name: str) -> type[Event]:
    """The event with this former name, with a warning."""
    found = _FORMER.get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_former_name(f"events.{name}", f"events.{found.__name__}")
    return found


def subscribe(
    listener: Listener, *, shows_notices: bool = True, takes_samples: bool = False, takes_steps: bool = True
) -> Callable[[], None]:
    """Call `listener` with every event from now on.

    Args:
        listener: a function of one event. It runs in the emitting thread.
        shows_notices: whether it shows notices to the user; otherwise they are logged.
        takes_samples: whether it uses TensorsMeasured, which takes time to measure.
        takes_steps: whether it uses StepEnded, which is emitted in every step; if not, it is not called with it.

    Returns:
        A function that ends the subscription; further calls do nothing.

    Example:
        >>> def listener(event):
        ...     if isinstance(event, gossamer.events.Skipped):
        ...         print(f"step {event.step}: {event.tensor} was not finite")
        >>> unsubscribe = gossamer.events.subscribe(listener)
        >>> unsubscribe()
    """
    ending = ExitStack()  # closing it again does nothing
    kinds = ((_samplers, takes_samples), (_silent, not shows_notices), (_stepless, not takes_steps), (_listeners, True))
    for listeners, belongs in kinds:
        if belongs:
            listeners.append(listener)
            ending.callback(listeners.remove, listener)
    return ending.close


def report_sessions(begin: Callable[[AttachRequest], str]) -> None:
    """Call `begin` before each session is attached, instead of the function given before.

    begin: subscribes the listeners of one session, and returns the path of its record, or "". It may raise AttachError.
    """
    global _begin_reports
    _begin_reports = begin


def begin_reports(request: AttachRequest) -> str:
    """Start reporting the session that is about to be attached. Returns the path of its record, or ""."""
    return "" if _begin_reports is None else _begin_reports(request)


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
