"""Membership of a worker at its servers: agree, join, leave, and the barrier at which all workers have left."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import AtOnce, PeerScript, Pulled, Stamp
from gossamer.errors import MalformedError, MismatchError
from gossamer.train.parameter_server.client.requests import Requests, about, check
from gossamer.train.parameter_server.client.shard_client import ShardClient
from gossamer.train.parameter_server.client.step_result import RunTotals
from gossamer.train.parameter_server.deduplication import LATE
from gossamer.train.parameter_server.update_policy import (
    AGREED,
    END,
    ENDS,
    EXACT,
    JOIN,
    LEAVE,
    LEFT,
    STOP,
    TOGETHER,
)


class ServerMembership:
    """Joins and leaves all servers at the same step, in an order that prevents deadlocks between servers."""

    def __init__(self, requests: Requests, in_rounds: bool) -> None:
        self.step = 0  # of the next contribution; joining may advance it
        self.final_values: tuple[Payload, ...] = ()  # by server, set by `end`
        self._requests, self._in_rounds = requests, in_rounds
        self.announcements = 0  # number of joins and leaves, which identifies duplicates

    def agree(self) -> PeerScript:
        """Wait until all servers hold a shard. Raises MismatchError if one has another model or recipe."""
        answers = yield self._requests.pull_all(AGREED)
        for shard_client, answer in zip(self._requests.shard_clients, answers, strict=True):
            if answer.about != shard_client.spec.agreed_settings():
                raise MismatchError(
                    f"{shard_client.peer} was started with {answer.about}, but worker {self._requests.worker} runs "
                    f"{shard_client.spec.agreed_settings()}. Run the same script with the same recipe on every worker."
                )

    def join(self) -> PeerScript:
        """Agree with all servers on the next step, one that is open on each of them."""
        open_steps = [self.step]
        while open_steps:
            self.step, open_steps = max(open_steps), []
            for some in self._first_server_last():
                stamp = self._announcement()
                receipts = yield AtOnce(
                    tuple(self._requests.push(each, JOIN, stamp, each.spec.agreed_settings()) for each in some)
                )
                check(receipts, MismatchError)
                open_steps += [int(about(receipt)["least"]) for receipt in receipts if receipt.version == LATE]

    def leave(self, about: str = "") -> PeerScript:
        """Leave, so that no worker waits for this one until it pushes again."""
        for some in self._first_server_last():
            stamp = self._announcement()
            yield AtOnce(tuple(self._requests.push(each, LEAVE, stamp, about) for each in some))

    def end(self) -> PeerScript:
        """Leave for good, wait until all workers have, and fetch `final_values`. Returns RunTotals.

        Each server decides by itself which disconnected workers miss the end. Once all have ended at the first server,
        no worker connected to it pushes to another one.
        """
        return (yield from self._leave_and_pull(ENDS, END, END))

    def _leave_and_pull(self, about_leaving: str, key: str, elsewhere: str) -> PeerScript:
        yield from self.leave(about_leaving)
        first, *others = self._requests.shard_clients
        answers: list[Pulled] = [(yield self._requests.pull(first, key))]
        # A worker that has left the first server has left all; waiting at two servers could deadlock.
        if others:
            answers += yield AtOnce(tuple(self._requests.pull(each, elsewhere) for each in others))
        check(answers, MalformedError)
        self.final_values = tuple(answer.payload for answer in answers)
        if self._in_rounds:  # the next round is the same for all
            self.step = max(self.step, *(answer.version for answer in answers))
        totals = max(map(about, answers), key=lambda each: int(each["applied"]))
        staleness = {int(versions): int(count) for versions, count in totals["staleness"].items()}
        missed = any(each["missed"] for each in map(about, answers))
        samples = float(totals["samples"])
        return RunTotals(int(totals["applied"]), int(totals["late"]), staleness, missed, samples)

    def barrier(self) -> PeerScript:
        """Wait for all workers, and join together with those that have not ended. Returns RunTotals."""
        totals = yield from self._leave_and_pull("", LEFT, EXACT)
        yield from self.join()
        yield self._requests.pull(self._requests.shard_clients[0], TOGETHER)
        return totals

    def stop(self) -> PeerScript:
        """End the run for all workers, which are informed with their next parameters."""
        stamp = Stamp(self._requests.worker, self.step)
        yield self._requests.push(self._requests.shard_clients[0], STOP, stamp)

    def _first_server_last(self) -> tuple[Sequence[ShardClient], ...]:
        """The servers in two groups. A worker announced at the first server is announced at all others already."""
        first, others = self._requests.shard_clients[:1], self._requests.shard_clients[1:]
        return tuple(some for some in (others, first) if some)

    def _announcement(self) -> Stamp:
        self.announcements += 1
        return Stamp(self._requests.worker, self.step, self.announcements)
