"""Termination of pairwise gossip: once every live worker is done, the lowest live rank averages all parameters and
distributes the result. If it fails, the next rank takes over, from a mean already published if there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import nan
from typing import Any

from gossamer.algorithms.gossip.final_mean import FinalMean, RunningMean, decode_mean
from gossamer.algorithms.gossip.partner import AVERAGE, Partner, answering, incarnation_of, with_incarnation
from gossamer.algorithms.gossip.state_transfer import STATUS, PeerStatus, decode_status, hash_of
from gossamer.base.kernels import all_finite
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import (
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
from gossamer.comm.runtime.peer_thread import PeerEndpoint, RunningScript
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.errors import ConnectError, PeerLost
from gossamer.events import notice

# Keys of pushes: a greeting; a request to end the run; the sender is done; the final mean; the receiver may leave
HELLO, STOP, DONE, FINAL_MEAN, DISMISSED = "here", "stop", "done", "agreed", "over"
NOW, FINAL = "now", "final"  # keys of pulls: the published parameters; the share of the final mean, or that mean
MEETING_SECONDS = 60.0  # time limit for greetings of all others
RETURN_SECONDS = 5.0  # a returning worker waits this long for slow peers
GLANCE_SECONDS = 0.05  # between checks whether the peer of a request has left


Claim = Callable[[str], str | None]  # stores a text unless one is stored; returns the stored one, None without a store


class TerminationProtocol:
    """One worker's view of the others' progress, and the pushes and pulls that end the run on all workers.

    At the end, every worker pushes DONE and continues to answer. Once all live workers have, the lowest live rank pulls
    the parameters of each, pushes the mean to all, and dismisses them. If it leaves first, the next rank repeats this,
    with the mean that any worker already has. All remaining workers thus adopt the same bits, and a lost worker delays
    the others only until its loss is detected.

    After a network partition, each part considers the other one lost, and would end with its own mean. A mean is
    therefore adopted only once it is unique in the run: a worker accepts one mean only, and its leader calls `claim` to
    enter the mean's hash in a store that all parts share and that keeps the first entry. Without such a store, more
    than half of all workers must have accepted the mean. All others raise PeerLost, which names the lost workers.

    Messages of an earlier incarnation do not count for a worker that returned; the other workers repeat their state in
    their replies to its greeting.
    """

    def __init__(
        self,
        partner: Partner,
        world: int,
        claim: Claim = lambda text: None,
        state: Callable[[], Payload] = tuple,
    ) -> None:
        self._partner, self._rank, self._world, self._claim = partner, partner.rank, world, claim
        self._state = state  # returns the current other state that is averaged with the parameters
        self._changed = threading.Condition()
        # By key, the newest incarnation of each worker that sent it
        self._reports: dict[str, dict[int, int]] = {key: {} for key in (HELLO, STOP, DONE, FINAL_MEAN, DISMISSED)}
        self._averaged_state: Payload = ()
        self._agreed: FinalMean | None = None
        self._agreed_hash = ""
        self._done = self._deaf = False
        self._dismissed_with: set[str] = set()  # hashes of the means in dismissals of this worker
        self.steps = 0  # of this worker, for its status

    @property
    def live(self) -> list[int]:
        """The other live workers, ascending."""
        return [peer for peer in range(self._world) if peer != self._rank and not self._partner.is_gone(peer)]

    @property
    def must_stop(self) -> bool:
        """Whether a worker requested the end of the run, or the final mean exists: later training would be lost."""
        return bool(self._reports[STOP]) or self._dismissed

    @property
    def _done_here(self) -> set[int]:
        """Workers that are done in their newest incarnation."""
        done = self._reports[DONE].items()
        return {peer for peer, incarnation in done if incarnation == self._partner.newest_incarnation(peer)}

    # -- receiving -----------------------------------------------------------------------------------------------------

    def listen(self, moved: Callable[[Peer, str], None] = lambda peer, where: None) -> PeerScript:
        """Answer every peer while the endpoint is open: averages as the partner does, and the keys of this module.

        Args:
            moved: called with the new address of a worker that returned.
        """
        averages = answering(self._partner)
        next(averages)
        try:
            while True:
                received = yield Await()
                reply = self._answer(received)
                if reply is None:
                    op = averages.send(received)
                    while not isinstance(op, Await):
                        op = averages.send((yield op))
                else:
                    yield reply  # first, since a thread that is notified below may close the endpoint
                match received:
                    case Arrived(sender=sender, op=Push(key=key, about=where)) if key == HELLO and where:
                        moved(sender, where)
                self._note(received)
        finally:
            with self._changed:
                self._deaf = True
                self._changed.notify_all()

    def _answer(self, received: PeerEvent) -> Reply | None:
        """The reply to an event; None if the partner answers it."""
        match received:
            case Arrived(token=token, op=Push(key=key)) if key == HELLO:
                return Reply(token=token, answer=Receipt(version=0, about=self._status().encoded()))
            case Arrived(token=token, op=Push(key=key, payload=payload)) if key == FINAL_MEAN:
                return Reply(token=token, answer=Receipt(version=0 if self._accepts(payload) else -1))
            case Arrived(token=token, op=Push(key=key)) if key != AVERAGE:
                return Reply(token=token, answer=Receipt(version=0 if key in self._reports else -1))
            case Arrived(token=token, op=Pull(key=key)) if key == STATUS:
                return Reply(token=token, answer=Pulled(version=0, about=self._status().encoded()))
            case Arrived(token=token, op=Pull(key=key)) if key == FINAL:
                return Reply(token=token, answer=self._final())
            case Arrived(token=token, op=Pull(key=key)) if key == NOW:
                return Reply(token=token, answer=Pulled(version=0, payload=self._own_payload(NOW)))
        return None

    def _final(self) -> Pulled:
        """This worker's share of the final mean, or that mean. Version -1 if this worker returned and is not done."""
        with self._changed:
            known, done = self._agreed, self._done
        if known is not None:
            return Pulled(version=0, payload=known.encoded(), about=FINAL_MEAN)
        return Pulled(version=0, payload=self._own_payload(FINAL)) if done else Pulled(version=-1)

    def _status(self) -> PeerStatus:
        with self._changed:
            return PeerStatus(
                incarnation=self._partner.incarnation,
                steps=self.steps,
                done=self._done,
                stop=self.must_stop,
                agreed=self._agreed is not None,
                here=(*self.live, self._rank),
            )

    def _note(self, received: PeerEvent) -> None:
        with self._changed:
            match received:
                case Arrived(sender=sender, op=Push(key=key, stamp=stamp, about=about)) if key in self._reports:
                    self._record_report(key, sender.number, incarnation_of(stamp.step))
                    if key == DISMISSED:
                        self._dismissed_with.add(about)
            self._changed.notify_all()

    def _record_report(self, key: str, peer: int, incarnation: int) -> None:
        """Record the key of a worker's incarnation. A late message of an earlier incarnation changes nothing."""
        self._partner.meet(peer, incarnation)
        self._reports[key][peer] = max(incarnation, self._reports[key].get(peer, 0))

    def _catch_up(self, peer: int, status: PeerStatus) -> None:
        """Record the status of a worker, for messages that this worker missed before it returned."""
        with self._changed:
            self._partner.meet(peer, status.incarnation)
            for key, announced in ((DONE, status.done), (STOP, status.stop)):
                if announced:
                    self._record_report(key, peer, status.incarnation)
            self._changed.notify_all()

    def _accepts(self, payload: Payload) -> bool:
        """Whether this worker accepts this mean, or has accepted it: the first one that fits, and no other."""
        with self._changed:
            if self._agreed is None and self._fits(payload):
                self._agree(decode_mean(payload))
            return self._agreed is not None and self._agreed_hash == hash_of(payload)

    def _agree(self, mean: FinalMean) -> None:
        self._agreed, self._agreed_hash = mean, hash_of(mean.encoded())

    def _fits(self, payload: Payload) -> bool:
        """Whether a final mean has the shapes and dtypes of this worker's own."""
        kinds = [(each.shape, each.dtype) for each in FinalMean(self._own_payload(FINAL), 0.0).encoded()]
        return [(each.shape, each.dtype) for each in payload] == kinds

    def _own_payload(self, key: str) -> Payload:
        return (*self._partner.snapshot(-1).payload, *(self._averaged_state if key == FINAL else self._state()))

    # -- sending -------------------------------------------------------------------------------------------------------

    def meet(self, me: PeerEndpoint) -> None:
        """Greet all others, since only a worker that was connected once can be found lost. Raises ConnectError."""
        handles = self._push_to_all(me, range(self._world), HELLO)
        for peer, handle in handles.items():
            try:
                handle.wait(MEETING_SECONDS)
            except TimeoutError:
                raise ConnectError(
                    f"worker {peer} did not answer for {MEETING_SECONDS:.0f} s, so its loss could not be detected "
                    "later. Workers of pairwise gossip connect to each other on ports of their own: open them in "
                    "firewalls."
                ) from None

    def meet_again(self, me: PeerEndpoint, here: Iterable[int], where: str) -> None:
        """Announce to all others that this worker returned and listens at `where`. Waits for a short time for those in
        `here`; a worker that does not answer counts as lost until it does."""
        handles = self._push_to_all(me, range(self._world), HELLO, about=where)
        until = time.monotonic() + RETURN_SECONDS
        for peer in here:
            if peer in handles:
                with suppress(TimeoutError, ConnectError):
                    handles[peer].wait(max(0.0, until - time.monotonic()))

    def stop(self, me: PeerEndpoint) -> None:
        """Request the end of the run after the next step of all others, without waiting for replies."""
        self._push_to_all(me, range(self._world), STOP)

    def _push_to_all(
        self, me: PeerEndpoint, peers: Iterable[int], key: str, payload: Payload = (), about: str = ""
    ) -> dict[int, RunningScript]:
        return {peer: me.start(self.push_status(peer, key, payload, about)) for peer in peers if peer != self._rank}

    def push_status(self, peer: int, key: str, payload: Payload = (), about: str = "") -> PeerScript:
        """Push to one worker and record the status in its reply. Returns whether it accepts."""
        stamp = Stamp(self._rank, with_incarnation(self._partner.incarnation, 0))
        receipt = yield Push(to=Peer(WORKER, peer), key=key, stamp=stamp, payload=payload, about=about)
        if receipt.about:
            self._catch_up(peer, decode_status(receipt.about))
        return receipt.version >= 0

    def wait(self, handle: RunningScript, peer: int) -> Any:
        """The result of a script with a request to `peer`; None if that has left. Raises the script's errors."""
        while not self._partner.is_gone(peer):
            with suppress(TimeoutError):
                return handle.wait(GLANCE_SECONDS)
        return None

    # -- means ---------------------------------------------------------------------------------------------------------

    def now(self, me: PeerEndpoint) -> FinalMean:
        """The mean of the parameters that live workers published last; they continue training."""
        return self._mean(me, NOW)

    def end(self, me: PeerEndpoint, averaged_state: Payload) -> FinalMean:
        """Wait until all live workers are done, and return the final mean, the same bits on each of them.

        This worker must have no exchange in flight.

        Args:
            averaged_state: averaged together with the parameters.

        Raises:
            ConnectError: this worker's endpoint was closed.
            PeerLost: other workers may have ended with another mean.
        """
        with self._changed:
            self._averaged_state, self._done = averaged_state, True
        self._push_to_all(me, range(self._world), DONE)  # also to lost workers, which may return and wait
        while True:
            with self._changed:
                current_worker().wait_for(self._changed, lambda: self._deaf or self._dismissed or self._is_leader)
                if self._deaf:
                    raise ConnectError(f"the endpoint of {me.me} is closed, so it cannot join the final mean.")
                if self._dismissed and self._agreed is not None:
                    self._check_taken()
                    return self._agreed
            self._run_as_leader(me)

    @property
    def _dismissed(self) -> bool:
        return bool(self._agreed and self._reports[DISMISSED])

    @property
    def _is_leader(self) -> bool:
        """Whether this worker is to compute the final mean now: the exchanges of all workers have ended."""
        live = set(self.live)
        return self._rank < min(live, default=self._world) and live <= self._done_here

    def _run_as_leader(self, me: PeerEndpoint) -> None:
        found = self._agreed or self._mean(me, FINAL)
        with self._changed:
            if self._agreed is None:
                self._agree(found)
            mean, text = (self._agreed or found).encoded(), self._agreed_hash
        handles = self._push_to_all(me, self.live, FINAL_MEAN, mean)
        accepted = [bool(self.wait(handle, peer)) for peer, handle in handles.items()]  # all have it before any ends
        self._check_claimed(text, 1 + sum(accepted))
        handles = self._push_to_all(me, self.live, DISMISSED, about=text)
        for peer, handle in handles.items():
            self.wait(handle, peer)
        with self._changed:
            self._reports[DISMISSED][self._rank] = self._partner.incarnation
            self._dismissed_with.add(text)

    def _check_claimed(self, text: str, accepted: int) -> None:
        """Raise PeerLost unless the mean with this hash, accepted by `accepted` workers, is the run's."""
        claimed = self._claim(text)
        if not (2 * accepted > self._world if claimed is None else claimed == text):
            raise self._apart()

    def _check_taken(self) -> None:
        """Raise PeerLost if no leader's dismissal names this worker's mean."""
        if self._agreed_hash not in self._dismissed_with:
            raise self._apart()

    def _apart(self) -> PeerLost:
        gone = ", ".join(str(peer) for peer in range(self._world) if self._partner.is_gone(peer)) or "some"
        return PeerLost(
            f"worker {self._rank} finished without a connection to workers {gone}: they ended, or may end, with "
            "another mean. This worker keeps its own parameters. Load the parameters that another worker has saved, or "
            "restart the run from them."
        )

    def _mean(self, me: PeerEndpoint, key: str) -> FinalMean:
        """Mean over all live workers with finite parameters, by rank; or the final mean, if one of them has it."""
        found = RunningMean()
        for peer, pulled in self._pull(me, key):
            if pulled.about == FINAL_MEAN:
                return decode_mean(pulled.payload)
            if not pulled.payload:
                continue
            if all(all_finite(tensor) for tensor in pulled.payload):
                found.add(pulled.payload)
            else:
                notice(f"worker {peer}'s parameters are not finite: they are left out of the mean")
        return found.mean() if found.count else FinalMean(self._own_payload(key), nan)

    def _pull(self, me: PeerEndpoint, key: str) -> Iterator[tuple[int, Pulled]]:
        """Yield the share of each live worker, by rank, including this one. For the final mean only of workers that
        are done: one that was considered lost and returned may still train."""

        def op(peer: int) -> PeerScript:
            return (yield Pull(of=Peer(WORKER, peer), key=key))

        asked = [peer for peer in self.live if key == NOW or peer in self._done_here]
        for peer in sorted([*asked, self._rank]):
            if peer == self._rank:
                yield peer, Pulled(version=0, payload=self._own_payload(key))
            elif (pulled := self.wait(me.start(op(peer)), peer)) is not None:
                yield peer, pulled
