"""Negotiation: collects the calls of a process set by name and performs those that every rank has made.

Ranks may make named calls in different orders. A round is one exchange: each rank sends the
names of its pending calls. Calls that are pending on all ranks are performed, in the order of the first rank. A rank
begins a round when one of its calls is pending, so idle ranks exchange nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.base.ops import AllGather, CollectiveOp
from gossamer.base.transport import Transport
from gossamer.errors import AttachError
from gossamer.horovod.calls import AllReduceCall, CollectiveCall, ReductionOp, TransportCall, fused_answers
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.timeline import CallTimeline
from gossamer.train.session.named_values import tensor_of
from gossamer.train.session.world_calls import bytes_of

STALL_SECONDS = 60.0  # after which missing ranks are named
LONGEST_PAUSE_SECONDS = 0.05
SHORT = 1024  # bytes of a text that travels at once, with its length
_LENGTH = Struct("!Q")
ADDS_UP = {ReductionOp.SUM.value, ReductionOp.AVERAGE.value}  # operations for which zeros of joined ranks mean nothing

RankReport = Mapping[str, Any]  # one rank's part of a round: {"joined": bool, "calls": {name: [kind, form, sizes]}}


@dataclass(eq=False)
class PendingCall:
    """A call that waits for other ranks."""

    name: str
    call: CollectiveCall
    future: Future[Any] = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)
    warned: bool = False


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """fusion_bytes: up to which allreduces travel as one; cycle_seconds: how long a round waits for more calls."""

    fusion_bytes: int = 64 * 2**20
    cycle_seconds: float = 0.0


class Lane:
    """The calls of one process set on this rank, with a thread that negotiates and performs them."""

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        settings: RoundSettings = RoundSettings(),
        timeline: Callable[[], CallTimeline | None] = lambda: None,
    ) -> None:
        self.transport, self.ranks = transport, tuple(ranks)
        self._settings, self._timeline = settings, timeline
        self._pending: dict[str, PendingCall] = {}
        self._changed = threading.Condition()
        self._joined: Future[int] | None = None
        self._others_joined: set[int] = set()
        self._last_joined = 0  # the rank that joined last
        self._unnamed = 0
        self._broken: str | None = None
        self._closing = False
        self._pause = 0.0
        work = copy_context()
        self._thread = threading.Thread(target=work.run, args=(self._serve,), name="gossamer-horovod", daemon=True)
        self._thread.start()

    def submit(self, call: CollectiveCall, name: str | None = None) -> PendingCall:
        """Make a call. name: the same on every rank; None: calls are matched by their number.

        Raises:
            ValueError: a call of this name still waits.
            HorovodInternalError: the process set is broken.
        """
        with self._changed:
            self._refuse_broken()
            if name is None:
                key, self._unnamed = f"noname.{self._unnamed}", self._unnamed + 1
            else:
                key = f"{call.kind}.{name}"
            if key in self._pending:
                raise ValueError(
                    f"Duplicate tensor name: {key!r} was submitted before and has not been performed yet. Call "
                    "synchronize(handle) first, or give each call a name of its own."
                )
            pending = self._pending[key] = PendingCall(key, call)
            self._changed.notify_all()
        return pending

    def join(self) -> Future[int]:
        """Contribute zeros until all ranks have joined. The future has the rank that joined last."""
        with self._changed:
            self._refuse_broken()
            if self._joined is None:
                self._joined = Future()
            self._changed.notify_all()
            return self._joined

    def close(self) -> None:
        """Leave the process set. Other ranks that still wait for this one receive HorovodInternalError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            idle = not self._pending and self._joined is None
        if idle:
            self._thread.join(timeout=5)
        with suppress(RuntimeError):
            self.transport.close()
        self._break("Horovod has been shut down")

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise HorovodInternalError(self._broken)

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            waiting: list[Future[Any]] = [pending.future for pending in self._pending.values()]
            if self._joined is not None:
                waiting.append(self._joined)
            self._pending, self._joined = {}, None
        for future in waiting:
            if not future.done():
                future.set_exception(HorovodInternalError(self._broken))

    # -- the thread ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _serve(self) -> None:
        while self._has_work():
            try:
                self._round()
            except Exception as failure:
                self._break(f"{type(failure).__name__}: {failure}")
                with suppress(RuntimeError):  # or other ranks would wait for this one
                    self.transport.close()
                return

    def _has_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._pending or self._joined is not None)
            if self._settings.cycle_seconds and not self._closing:
                self._changed.wait_for(lambda: self._closing, self._settings.cycle_seconds)
            return not self._closing

    def _round(self) -> None:
        with self._changed:
            own_calls, joined = dict(self._pending), self._joined is not None
        began = time.perf_counter()
        requests = {name: [each.call.kind, each.call.form(), each.call.sizes()] for name, each in own_calls.items()}
        reports: list[RankReport] = [
            json.loads(text)
            for text in _all_gathered(self.transport, json.dumps({"joined": joined, "calls": requests}).encode())
        ]
        if (timeline := self._timeline()) is not None:
            timeline.cycle(began)
        now_joined = {rank for rank, each in enumerate(reports) if each["joined"]}
        newest, self._others_joined = now_joined - self._others_joined, now_joined
        if newest:  # possibly rounds before the last call is performed
            self._last_joined = max(newest)
        if len(now_joined) == len(reports) and not any(each["calls"] for each in reports):
            self._all_joined(self.ranks[self._last_joined])
        elif self._perform(_common_names(reports), reports, own_calls):
            self._pause = 0.0
        else:
            self._wait_for_more(reports, own_calls)

    def _all_joined(self, last: int) -> None:
        with self._changed:
            done, self._joined = self._joined, None
            self._others_joined, self._unnamed = set(), 0
        if done is not None:
            done.set_result(last)

    def _wait_for_more(self, reports: Sequence[RankReport], own_calls: Mapping[str, PendingCall]) -> None:
        """No call is common to all ranks: some wait for different ones."""
        self._warn_of_missing_ranks(reports, own_calls)
        self._pause = min(2 * self._pause + 0.0005, LONGEST_PAUSE_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._pending.keys() != own_calls.keys(), self._pause)

    def _warn_of_missing_ranks(self, reports: Sequence[RankReport], own_calls: Mapping[str, PendingCall]) -> None:
        for name, pending in own_calls.items():
            if pending.warned or time.perf_counter() - pending.since < STALL_SECONDS:
                continue
            pending.warned = True
            missing = [self.ranks[rank] for rank, each in enumerate(reports) if name not in each["calls"]]
            if self.transport.rank == 0:
                events.notice(
                    f"{name} waits for {STALL_SECONDS:g} s: ranks {missing} have not called it. Call it on every rank "
                    "of the process set, with the same name"
                )

    def _perform(
        self, names: Sequence[str], reports: Sequence[RankReport], own_calls: Mapping[str, PendingCall]
    ) -> int:
        """Perform the calls of these names; the number of them."""
        agreed: list[tuple[str, CollectiveCall]] = []
        for name in names:
            requests = [each["calls"].get(name) for each in reports]
            if (fault := _fault(name, requests, self.ranks)) is not None:
                self._finish(own_calls.get(name), partial(_fail, fault))
            elif name in own_calls:
                agreed.append((name, own_calls[name].call))
            else:
                agreed.append((name, AllReduceCall.zeros(next(form for _, form, _ in filter(None, requests)))))
        for batch in _batches(agreed, self._settings.fusion_bytes):
            self._perform_batch(batch, reports, own_calls)
        return len(names)

    def _perform_batch(
        self,
        batch: Sequence[tuple[str, CollectiveCall]],
        reports: Sequence[RankReport],
        own_calls: Mapping[str, PendingCall],
    ) -> None:
        began = time.perf_counter()
        first_name, first = batch[0]
        if isinstance(first, AllReduceCall):
            calls = [call for _, call in batch if isinstance(call, AllReduceCall)]
            answers = fused_answers(calls, self.transport)
        else:
            rank_sizes = [each["calls"][first_name][2] for each in reports]
            answers = [first.answer(self.transport, rank_sizes)]
        for (name, call), answer in zip(batch, answers, strict=True):
            pending = own_calls.get(name)
            if (timeline := self._timeline()) is not None and pending is not None:
                timeline.call(name, call.kind, pending.since, began)
            self._finish(pending, partial(_succeed, answer))

    def _finish(self, pending: PendingCall | None, end: Callable[[PendingCall], None]) -> None:
        if pending is None:
            return
        with self._changed:
            self._pending.pop(pending.name, None)
        end(pending)


def _all_gathered(transport: Transport, text: bytes) -> list[bytes]:
    """The texts of all ranks. Short ones travel by one operation."""

    def gathered(content: bytes, size: int) -> list[bytes]:
        padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
        padded[: len(content)] = tensor_of(content)
        return [bytes_of(part) for (part,) in transport.answer(AllGather((padded,)))]

    frames = gathered(_LENGTH.pack(len(text)) + text[: SHORT - _LENGTH.size], SHORT)
    lengths = [_LENGTH.unpack_from(frame)[0] for frame in frames]
    if (longest := max(lengths)) > SHORT - _LENGTH.size:
        return [whole[:length] for whole, length in zip(gathered(text, longest), lengths, strict=True)]
    return [frame[_LENGTH.size :][:length] for frame, length in zip(frames, lengths, strict=True)]


def _fail(fault: str, pending: PendingCall) -> None:
    pending.future.set_exception(HorovodInternalError(fault))


def _succeed(answer: Any, pending: PendingCall) -> None:
    try:
        pending.future.set_result(pending.call.finish(answer))
    except Exception as failure:
        pending.future.set_exception(failure)


def _common_names(reports: Sequence[RankReport]) -> list[str]:
    """The names that every rank has, in the order of the first; ranks that have joined need not have them."""
    live = [each["calls"] for each in reports if not each["joined"]] or [
        each["calls"] for each in reports if each["calls"]
    ]
    common = [name for name in live[0] if all(name in calls for calls in live)] if live else []
    # A rank that has joined still makes the calls of its training sessions
    return [
        name
        for name in common
        if live[0][name][0] != TransportCall.kind or all(name in each["calls"] for each in reports)
    ]


def _fault(name: str, requests: Sequence[list[Any] | None], ranks: Sequence[int]) -> str | None:
    """Why a call cannot be performed. requests: its kind, form and sizes on each rank, None on those that joined."""
    given = [each for each in requests if each is not None]
    kind, form, _ = given[0]
    if any(each[:2] != [kind, form] for each in given):
        texts = [f"rank {rank}: {each[0]} {each[1]}" for rank, each in zip(ranks, requests, strict=True) if each]
        return (
            f"ranks made different calls of the name {name!r} ({'; '.join(texts)}). Use the same operation, shape, "
            "dtype and factors on every rank, and a name of its own for each tensor."
        )
    if len(given) < len(requests) and not (kind == AllReduceCall.kind and form[1] in ADDS_UP):
        return (
            f"{kind} is not supported while some ranks have called join(): only allreduce with Sum or Average is. "
            "Call join() on every rank before it. A DistributedOptimizer begins with such calls, so each rank makes "
            "one step with it before join(): give each rank a batch or more."
        )
    return None


def _batches(agreed: Sequence[tuple[str, CollectiveCall]], fusion_bytes: int) -> list[list[tuple[str, CollectiveCall]]]:
    """Calls that travel together, in an order that is the same on every rank."""
    batches: list[list[tuple[str, CollectiveCall]]] = []
    open_batches: dict[Any, tuple[list[tuple[str, CollectiveCall]], int]] = {}
    for name, call in agreed:
        key = call.fuses_with if isinstance(call, AllReduceCall) else None
        if key is None or not isinstance(call, AllReduceCall):
            batches.append([(name, call)])
            continue
        batch, size = open_batches.get(key, ([], 0))
        if not batch or size + call.nbytes > fusion_bytes:
            batch, size = [], 0
            batches.append(batch)
        batch.append((name, call))
        open_batches[key] = batch, size + call.nbytes
    return batches


class LaneTransport:
    """A transport over a lane, for a training session of one process set: its operations are negotiated calls."""

    def __init__(self, lane: Lane, title: str) -> None:
        """title: the session's, the same on every rank and of no other session."""
        self._lane, self._title, self._count = lane, title, 0
        self.rank, self.world, self.links = lane.transport.rank, lane.transport.world, ""

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        return self._submit(type(op).__name__, lambda transport: transport.answer(op))

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def make_progress(self) -> bool:
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._submit("broadcast", lambda transport: transport.broadcast_(tensors, source))()

    def all_gather_text(self, text: str) -> list[str]:
        texts: list[str] = self._submit("texts", lambda transport: transport.all_gather_text(text))()
        return texts

    def part(self, size: int) -> Transport:
        raise AttachError(
            "this recipe needs groups within the group, which a DistributedOptimizer of a process set does not have. "
            "Use it with the global process set, or write a recipe without Hierarchical and Sharded."
        )

    def close(self) -> None:
        """The lane stays: it belongs to the process set."""

    def _submit(self, about: str, perform: Callable[[Transport], Any]) -> Callable[[], Any]:
        self._count += 1
        call = TransportCall(about=about, perform=perform)
        return self._lane.submit(call, f"{self._title}.{self._count}").future.result
