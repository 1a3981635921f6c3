"""All come to the end, and take the same mean: what workers without lock step say beside their exchanges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.ops import Payload
from gossamer.core.peer_ops import (
    WORKER,
    Arrived,
    Await,
    Peer,
    PeerEvent,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.errors import ConnectError
from gossamer.events import notice
from gossamer.gossip.incarnation import incarnation_of, with_incarnation
from gossamer.gossip.pairwise import AVERAGE, Partner
from gossamer.gossip.pairwise_scripts import answering
from gossamer.gossip.state_transfer import ROLL, PeerStatus, decode_status
from gossamer.kernels import all_finite
from gossamer.runtime.peer_thread import PeerEndpoint, PeerThread

HERE, STOP, DONE, AGREED, OVER = "here", "stop", "done", "agreed", "over"
NOW, FINAL = "now", "final"
MEETING_SECONDS = 60.0  # until all others were heard once: their endpoints are open by then
RETURN_SECONDS = 5.0  # who came back waits no longer for those that are slow to hear of it
GLANCE_SECONDS = 0.05  # between looks at whether the peer that is asked has left


class FinalMean(NamedTuple):
    """A mean over workers. payload: the parameters (n,), then whatever else each of them gave; distance: how far they
    are from it, the root of the mean over workers of the squared distance."""

    payload: Payload
    distance: float


class TerminationProtocol:
    """What one worker has heard of the others, and the ways to tell them something and to agree with them.

    In the end, every worker says that it is done and goes on answering. Once all that are here have said so, the lowest
    rank asks each for its parameters, hands the mean to all, and dismisses them. If it leaves before, the next one
    begins anew, from the mean where anybody has one already. So all that stay take the same bits, and whoever left
    keeps nobody waiting for longer than it takes to notice. Where a link breaks for good between two that live, either
    counts the other as gone, and they may end apart.

    Somebody who was lost and came back has said nothing yet, whatever was heard of it before; what others have said
    before, they tell it when it greets them.
    """

    def __init__(self, partner: Partner, world: int) -> None:
        self._partner, self._rank, self._world = partner, partner.rank, world
        self._changed = threading.Condition()
        self._said: dict[str, dict[int, int]] = {key: {} for key in (HERE, STOP, DONE, AGREED, OVER)}
        self._along: Payload = ()
        self._agreed: FinalMean | None = None
        self._done = self._deaf = False
        self.steps = 0  # of this worker, for who asks

    @property
    def live(self) -> list[int]:
        """The other workers that are here, ascending."""
        return [peer for peer in range(self._world) if peer != self._rank and peer not in self._partner.gone]

    @property
    def told_to_stop(self) -> bool:
        """Somebody wants the run to end, or the last mean is made: what is trained after it would be thrown away."""
        return bool(self._said[STOP]) or self._dismissed

    @property
    def _done_here(self) -> set[int]:
        """Who has come to the end: a worker that came back since has not."""
        return {peer for peer, life in self._said[DONE].items() if life == self._partner.life_of(peer)}

    # -- heard ---------------------------------------------------------------------------------------------------------

    def listen(self, moved: Callable[[Peer, str], None] = lambda peer, where: None) -> PeerScript:
        """Answer whoever asks, for as long as it runs: averages as the partner does, and the words of this module.

        moved: hears where a worker listens that came back.
        """
        averages = answering(self._partner)
        next(averages)
        try:
            while True:
                heard = yield Await()
                reply = self._answer(heard)
                if reply is None:
                    op = averages.send(heard)
                    while not isinstance(op, Await):
                        op = averages.send((yield op))
                else:
                    yield reply  # first, since whoever hears of it below may close the endpoint
                match heard:
                    case Arrived(sender=sender, op=Push(key=key, about=where)) if key == HERE and where:
                        moved(sender, where)
                self._note(heard)
        finally:
            with self._changed:
                self._deaf = True
                self._changed.notify_all()

    def _answer(self, heard: PeerEvent) -> Reply | None:
        """None where it is not about parting."""
        match heard:
            case Arrived(token=token, op=Push(key=key)) if key == HERE:
                return Reply(token=token, answer=Receipt(version=0, about=self._roll().written()))
            case Arrived(token=token, op=Push(key=key)) if key != AVERAGE:
                return Reply(token=token, answer=Receipt(version=0 if key in self._said else -1))
            case Arrived(token=token, op=Pull(key=key)) if key == ROLL:
                return Reply(token=token, answer=Pulled(version=0, about=self._roll().written()))
            case Arrived(token=token, op=Pull(key=key)) if key == FINAL:
                return Reply(token=token, answer=self._final())
        return None

    def _final(self) -> Pulled:
        """This worker's part in the last mean, or that mean; nothing where it came back after it was asked, and is not
        done."""
        with self._changed:
            known, done = self._agreed, self._done
        if known is not None:
            return Pulled(version=0, payload=_written(known), about=AGREED)
        return Pulled(version=0, payload=self._mine(FINAL)) if done else Pulled(version=-1)

    def _roll(self) -> PeerStatus:
        with self._changed:
            return PeerStatus(
                life=self._partner.life,
                steps=self.steps,
                done=self._done,
                stop=self.told_to_stop,
                agreed=self._agreed is not None,
                here=(*self.live, self._rank),
            )

    def _note(self, heard: PeerEvent) -> None:
        with self._changed:
            match heard:
                case Arrived(sender=sender, op=Push(key=key, stamp=stamp, payload=payload)) if key in self._said:
                    self._say_that(key, sender.number, incarnation_of(stamp.step))
                    if key == AGREED and self._agreed is None and self._fits(payload):
                        self._agreed = _read(payload)
            self._changed.notify_all()

    def _say_that(self, key: str, peer: int, life: int) -> None:
        """A worker has said so in this life. What is late, of a life before, changes nothing."""
        self._partner.meet(peer, life)
        self._said[key][peer] = max(life, self._said[key].get(peer, 0))

    def _call(self, peer: int, roll: PeerStatus) -> None:
        """What a worker says of itself to who came back: all that this one has missed."""
        with self._changed:
            self._partner.meet(peer, roll.life)
            for key, said in ((DONE, roll.done), (STOP, roll.stop)):
                if said:
                    self._say_that(key, peer, roll.life)
            self._changed.notify_all()

    def _fits(self, payload: Payload) -> bool:
        """Whether what somebody agreed on is what this worker would have written, but for its numbers."""
        kinds = [(each.shape, each.dtype) for each in _written(FinalMean(self._mine(FINAL), 0.0))]
        return [(each.shape, each.dtype) for each in payload] == kinds

    def _mine(self, key: str) -> Payload:
        return (*self._partner.snapshot(-1).payload, *(self._along if key == FINAL else ()))

    # -- said ----------------------------------------------------------------------------------------------------------

    def meet(self, me: PeerEndpoint) -> None:
        """Hear all others once: only who was heard can be missed. Raises ConnectError."""
        handles = self._tell(me, range(self._world), HERE)
        for peer, handle in handles.items():
            try:
                handle.wait(MEETING_SECONDS)
            except TimeoutError:
                raise ConnectError(
                    f"worker {peer} was not heard for {MEETING_SECONDS:.0f} s, so nobody would notice when it leaves. "
                    "Workers of pairwise gossip dial each other on ports of their own: let no firewall stand between."
                ) from None

    def meet_again(self, me: PeerEndpoint, here: Iterable[int], where: str) -> None:
        """Let all others know that this worker came back, and `where` it listens. Waits for those that are `here`, and
        not for long: who is not heard counts as gone until it is."""
        handles = self._tell(me, range(self._world), HERE, about=where)
        until = time.monotonic() + RETURN_SECONDS
        for peer in here:
            if peer in handles:
                with suppress(TimeoutError, ConnectError):
                    handles[peer].wait(max(0.0, until - time.monotonic()))

    def stop(self, me: PeerEndpoint) -> None:
        """Ask all others to end the run after their next step; waits for nobody."""
        self._tell(me, range(self._world), STOP)

    def _tell(
        self, me: PeerEndpoint, peers: Iterable[int], key: str, payload: Payload = (), about: str = ""
    ) -> dict[int, PeerThread]:
        return {peer: me.start(self.say(peer, key, payload, about)) for peer in peers if peer != self._rank}

    def say(self, peer: int, key: str, payload: Payload = (), about: str = "") -> PeerScript:
        """Tell one worker; what that has to say of itself is heard."""
        stamp = Stamp(self._rank, with_incarnation(self._partner.life, 0))
        receipt = yield Push(to=Peer(WORKER, peer), key=key, stamp=stamp, payload=payload, about=about)
        if receipt.about:
            self._call(peer, decode_status(receipt.about))

    def wait(self, handle: PeerThread, peer: int) -> Any:
        """What the script returned that talks to `peer`; None where that has left. Raises what the script raised."""
        while peer not in self._partner.gone:
            with suppress(TimeoutError):
                return handle.wait(GLANCE_SECONDS)
        return None

    # -- means ---------------------------------------------------------------------------------------------------------

    def now(self, me: PeerEndpoint) -> FinalMean:
        """The mean of what this worker and those that are here have shown last; they go on meanwhile."""
        return self._mean(me, NOW)

    def end(self, me: PeerEndpoint, along: Payload) -> FinalMean:
        """Wait until all that are here have come to the end, and take the mean, the same bits on each of them.

        This worker has begun nothing that has not ended. along: what else is to be averaged. Raises ConnectError.
        """
        with self._changed:
            self._along, self._done = along, True
        self._tell(me, range(self._world), DONE)  # also who is gone: it may come back and wait
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._deaf or self._dismissed or self._leads)
                if self._deaf:
                    raise ConnectError(f"{me.me} hears nobody any more, so it cannot take part in the last mean.")
                if self._dismissed and self._agreed is not None:
                    return self._agreed
            self._lead(me)

    @property
    def _dismissed(self) -> bool:
        return bool(self._agreed and self._said[OVER])

    @property
    def _leads(self) -> bool:
        """Whether it is for this worker to average, now: everybody's exchanges have ended."""
        live = set(self.live)
        return self._rank < min(live, default=self._world) and live <= self._done_here

    def _lead(self, me: PeerEndpoint) -> None:
        agreed = self._agreed or self._mean(me, FINAL)
        with self._changed:
            self._agreed = agreed = self._agreed or agreed
        for key, payload in ((AGREED, _written(agreed)), (OVER, ())):  # nobody is dismissed before all have it
            handles = self._tell(me, self.live, key, payload)
            for peer, handle in handles.items():
                self.wait(handle, peer)
        with self._changed:
            self._said[OVER][self._rank] = self._partner.life

    def _mean(self, me: PeerEndpoint, key: str) -> FinalMean:
        """Over all that are here and finite, by rank; what one of them has agreed on, where that happened."""
        sums = RunningMean()
        for peer, pulled in self._ask(me, key):
            if pulled.about == AGREED:
                return _read(pulled.payload)
            if not pulled.payload:
                continue
            if all(all_finite(tensor) for tensor in pulled.payload):
                sums.add(pulled.payload)
            else:
                notice(f"worker {peer}'s parameters are not finite, and no mean would be with them: they are left out")
        return sums.mean() if sums.count else FinalMean(self._mine(key), nan)

    def _ask(self, me: PeerEndpoint, key: str) -> Iterator[tuple[int, Pulled]]:
        """What each worker that is here gives, by rank, asked one after the other; this one among them. For the last
        mean, of those that are done: somebody who was thought to be gone and is back may go on training."""

        def op(peer: int) -> PeerScript:
            return (yield Pull(of=Peer(WORKER, peer), key=key))

        asked = [peer for peer in self.live if key == NOW or peer in self._done_here]
        for peer in sorted([*asked, self._rank]):
            if peer == self._rank:
                yield peer, Pulled(version=0, payload=self._mine(key))
            elif (pulled := self.wait(me.start(op(peer)), peer)) is not None:
                yield peer, pulled


@dataclass
class RunningMean:
    """A mean by the order in which numbers come, one division after the sum; how far they are from it is kept along.

    law:    sum |x - mean|^2 = sum over k of |x_k - mean of those before|^2 (k - 1) / k
    source: Welford 1962, Technometrics: nothing cancels, however close they are
    """

    totals: Sequence[Tensor] = ()
    count: int = 0
    away: float = 0.0

    def add(self, payload: Payload) -> None:
        if self.count:
            ahead = payload[0] - self.totals[0] / self.count
            self.away += ahead.double().square().sum().item() * self.count / (self.count + 1)
            torch._foreach_add_(list(self.totals), list(payload))
        else:
            self.totals = [tensor.clone() for tensor in payload]
        self.count += 1

    def mean(self) -> FinalMean:
        return FinalMean(tuple(total / self.count for total in self.totals), sqrt(self.away / self.count))


def _written(agreed: FinalMean) -> Payload:
    return (torch.tensor([agreed.distance], dtype=torch.float64, device="cpu"), *agreed.payload)


def _read(payload: Payload) -> FinalMean:
    return FinalMean(payload[1:], payload[0].item())
