"""Parameter-server client: pushes a worker's gradients and pulls parameters, as scripts without threads or sockets."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies.parameter_server import ASYNC
from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.peer_ops import AtOnce, Peer, PeerOp, PeerScript, Pulled, Push, Stamp
from gossamer.errors import CheckpointError, LoopError, MalformedError, MismatchError, NotFinite
from gossamer.train.parameter_server.client.requests import Requests, about, check
from gossamer.train.parameter_server.client.shard_client import ShardClient, shard_clients
from gossamer.train.parameter_server.client.step_result import GatheredStep, RunTotals, SentStep, StepResult, StepTimer
from gossamer.train.parameter_server.deduplication import LATE
from gossamer.train.parameter_server.from_recipe import push_pull_codecs
from gossamer.train.parameter_server.shard_message import ShardMessage
from gossamer.train.parameter_server.shard_spec import ELASTIC, Options, options_of
from gossamer.train.parameter_server.shard_state import count_of, described, file_of, state_of
from gossamer.train.parameter_server.update_policy import (
    AGREED,
    BEGIN,
    END,
    ENDS,
    EXACT,
    GRADIENT,
    JOIN,
    LEAVE,
    LEFT,
    PARAMETERS,
    SILENT,
    STATE,
    STOP,
    TOGETHER,
    WANTED,
)

ANSWER_SECONDS = 5.0  # for a server's answer about disconnected workers

__all__ = ["Client", "RunTotals", "StepResult"]


class Client:
    """Worker `worker` of `world`, with the parameters `tensors` on `shards` servers. In an elastic run `world` is
    ELASTIC, and `worker` a number that no other process has.

    Call `gather` and `apply_pull` on the training thread. Between them, run scripts on any thread, one at a time:
    `begin` once and then `push_pull`.

    Args:
        local_server: the server in this worker's process, if any.
        within_seconds: time limit of every request; None waits forever.

    Raises:
        AttachError: servers cannot rebuild the optimizer.
    """

    def __init__(
        self,
        worker: int,
        world: int,
        tensors: Mapping[str, Tensor],
        optimizer: Optimizer,
        recipe: Recipe,
        *,
        shards: int,
        seed: int = 0,
        local_server: Peer | None = None,
        within_seconds: float | None = None,
    ) -> None:
        codecs = push_pull_codecs(recipe)
        shards = codecs.strategy.shards or shards
        self.shard_clients = shard_clients(
            tensors, optimizer, codecs, recipe=repr(recipe), world=world, seed=seed, shards=shards
        )
        self._requests = Requests(worker, self.shard_clients, within_seconds)
        self._synchronous = codecs.strategy.mode != ASYNC
        self._membership = ServerMembership(self._requests, self._synchronous and not codecs.strategy.rounds_ahead)
        self._worker, self._world, self._tensors, self._optimizer = worker, world, tensors, optimizer
        self._rounds_ahead, self._local_server = codecs.strategy.rounds_ahead, local_server
        self._gathered: GatheredStep | None = None
        self._unanswered: tuple[Push, ...] = ()
        self._sent: SentStep | None = None  # a step with receipts, but without its pull
        self._finite = True
        self._timer = StepTimer()
        self.stopping = False  # whether a worker requested the end of the run

    @property
    def step(self) -> int:
        """Number of the next contribution."""
        return self._membership.step

    @step.setter
    def step(self, step: int) -> None:
        self._membership.step = step

    # -- on the training thread

    def gather(self, gradients: Mapping[str, Tensor | None], weight: float = 1.0) -> None:
        """Copy gradients by parameter name, and the optimizer's current hyperparameters, for `push_pull`.

        Args:
            gradients: None counts as zero.
            weight: in the mean over workers; 0 contributes nothing.
        """
        if self._unanswered or self._sent is not None:
            raise LoopError(
                f"step {self.step} was sent but not answered, so servers may have applied it, and would treat another "
                "one as its duplicate. Run push_pull() again first: it sends the same bytes."
            )
        for each in self.shard_clients:
            each.gather(gradients)
        known = tuple(max(each.applied_version, 0) for each in self.shard_clients)
        self._gathered = GatheredStep(options_of(self._optimizer), weight, known)

    def apply_pull(self) -> None:
        """Overwrite the parameters with the last pulled values."""
        for each in self.shard_clients:
            each.apply_pull(self._tensors)

    def apply_final(self) -> None:
        """Overwrite the parameters with the result of `end`."""
        for each, values in zip(self.shard_clients, self._membership.final_values, strict=True):
            each.scatter(values, self._tensors)

    # -- scripts: a step

    def begin(self) -> PeerScript:
        """Ensure that all servers have their shard, pull its parameters, and join.

        Worker 0 pushes the initial parameters to servers without a shard; in an elastic run, a worker that the first
        server asks to. The others wait for it. Raises MismatchError if a server has another shard.
        """
        if self._world == ELASTIC:
            answer = yield self._requests.pull(self.shard_clients[0], WANTED)
            check([answer], MismatchError)
            if about(answer)[WANTED]:  # the first server is last: until it has a shard, it asks other workers, too
                yield from self._send_shards(self.shard_clients[1:])
                yield from self._send_shards(self.shard_clients[:1])
        elif self._worker == 0:
            yield from self._send_shards(self.shard_clients)
        yield from self._membership.agree()
        yield from self._membership.join()
        yield from self.pull(self._clock)

    def _send_shards(self, some: Sequence[ShardClient]) -> PeerScript:
        stamp = Stamp(self._worker, 0)
        receipts = yield AtOnce(
            tuple(
                self._requests.push(each, BEGIN, stamp, each.spec.to_json(), each.parameters_of(self._tensors))
                for each in some
            )
        )
        check(receipts, MismatchError)

    def push_pull(self) -> PeerScript:
        """Push the gathered gradients, wait until the policy allows the next step, and pull. Returns StepResult.

        After PeerLost it may be run again and resumes: unanswered pushes are sent again, byte for byte.
        """
        self._timer.start()
        sent = self._sent = self._sent or (yield from self._push())
        if LATE in sent.applied:  # the others may be many steps ahead
            yield from self._membership.join()
        received = yield from self.pull(self._clock)
        self._sent = None
        return StepResult(
            step=sent.step,
            applied=sent.applied,
            versions=tuple(each.replica.version for each in self.shard_clients),
            bytes_sent=sent.bytes_sent,
            bytes_received=received,
            finite=self._finite,
            **self._timer.seconds(),
        )

    def _push(self) -> Generator[PeerOp, Any, SentStep]:
        pushes = self._unanswered = self._unanswered or self._encode_step()
        self._timer.lap("encode")
        receipts = yield AtOnce(pushes)
        self._unanswered = ()
        check(receipts, MalformedError)
        step, self.step = self.step, self.step + 1
        nbytes = sum(payload_bytes(push.payload) for push in pushes if push.to != self._local_server)
        return SentStep(step, tuple(receipt.version for receipt in receipts), nbytes)

    def pull(self, at_least: int = 0) -> PeerScript:
        """Pull the servers' parameters, once they have reached clock `at_least`. Returns the payload bytes received.

        For parameters that include every worker's pushes, each worker calls pull(client.step) at the end.
        """
        pulled = yield self._requests.pull_all(PARAMETERS, at_least)
        self._timer.lap("wire")
        check(pulled, MalformedError)
        for shard_client, each in zip(self.shard_clients, pulled, strict=True):
            shard_client.replica.update(each)
        self.stopping = self.stopping or any(about(each).get("stop", False) for each in pulled)
        self._timer.lap("decode")
        remote = (
            each
            for shard_client, each in zip(self.shard_clients, pulled, strict=True)
            if shard_client.peer != self._local_server
        )
        return sum(payload_bytes(each.payload) for each in remote)

    def exact(self) -> PeerScript:
        """Fetch the servers' current parameters, uncompressed. Returns new tensors by name."""
        found = {name: torch.empty_like(tensor) for name, tensor in self._tensors.items()}
        answers = yield self._requests.pull_all(EXACT)
        check(answers, MalformedError)
        for each, answer in zip(self.shard_clients, answers, strict=True):
            each.scatter(answer.payload, found)
        return found

    # -- scripts: membership

    def stop(self) -> PeerScript:
        """End the run for all workers, which are informed with their next parameters."""
        self.stopping = True
        return self._membership.stop()

    def leave(self) -> PeerScript:
        """Leave, so that no worker waits for this one until it pushes again."""
        return self._membership.leave()

    def end(self) -> PeerScript:
        """Leave, wait until all workers have left, and fetch their common parameters for `apply_final`.

        A worker that pushes again rejoins. Returns RunTotals.
        """
        return self._membership.end()

    def barrier(self) -> PeerScript:
        """Wait for all workers, and continue together with those that have not ended: between two epochs."""
        totals = yield from self._membership.barrier()
        yield from self.pull(self._clock)
        return totals

    def silent(self) -> PeerScript:
        """The workers that the first server considers lost. May run concurrently with another script. Raises PeerLost
        if the server does not answer in time."""
        request = replace(self._requests.pull(self.shard_clients[0], SILENT), known=-1, within_seconds=ANSWER_SECONDS)
        answer = yield request
        check([answer], MalformedError)
        return frozenset(about(answer)["silent"])

    # -- a step's pushes

    @property
    def _clock(self) -> int:
        """The servers' clock that this worker waits for before it computes its next step."""
        return max(self.step - self._rounds_ahead, 0) if self._synchronous else 0

    def _encode_step(self) -> tuple[Push, ...]:
        """Encode the gathered gradients for all servers; for none of them if a value is not finite.

        The compressors' state advances: an encoded message counts as sent.
        """
        if self._gathered is None:
            raise LoopError("there are no gradients to push: call gather(gradients) before each push_pull().")
        gathered, self._gathered = self._gathered, None
        stamps = [Stamp(self._worker, self.step, known) for known in gathered.known]
        weight, messages = gathered.weight, self._messages(stamps, gathered.options) if gathered.weight else None
        self._finite = messages is not None or not weight
        if messages is None:
            weight, messages = 0.0, [each.empty_message() for each in self.shard_clients]
        pushes: list[Push] = []
        for each, stamp, message in zip(self.shard_clients, stamps, messages, strict=True):
            each.commit(message)
            header = each.about(gathered.options, weight, message.counts)
            pushes.append(self._requests.push(each, GRADIENT, stamp, header, message.payload))
        return tuple(pushes)

    def _messages(self, stamps: Sequence[Stamp], options: Sequence[Options]) -> list[ShardMessage] | None:
        try:
            return [each.encode(stamp, options) for each, stamp in zip(self.shard_clients, stamps, strict=True)]
        except NotFinite:
            return None

    # -- checkpoints

    def server_state(self, number: int) -> PeerScript:
        """The state of one server's shard; no worker may change it during the transfer."""
        shard_client, content, nbytes = self.shard_clients[number], bytearray(), 1
        while len(content) < nbytes:
            request = self._requests.pull(shard_client, STATE, at_least=count_of(len(content)))
            answer = yield replace(request, known=-1)
            check([answer], MalformedError)
            (part,) = answer.payload
            content += part.numpy().tobytes()
            nbytes = int(about(answer)["nbytes"])
            if not len(part):
                raise MalformedError(f"{shard_client.peer} sent an empty piece of its state of {nbytes} bytes")
        return state_of(bytes(content))

    def restore_server(self, number: int, state: Mapping[str, Any], name: str) -> PeerScript:
        """Restore a state returned by `server_state`. name: unique name of this attempt."""
        shard_client, stamp = self.shard_clients[number], Stamp(self._worker, self.step)
        for entry, part in described(file_of(state), name):
            receipt = yield self._requests.push(shard_client, STATE, stamp, entry, (part,))
            check([receipt], CheckpointError)

    def state_dict(self) -> dict[str, Any]:
        """The step and the compressors' state, as views."""
        return {
            "step": self.step,
            "announcements": self._membership.announcements,
            "states": [
                [{key: packed.flat for key, packed in state.items()} for state in each.states]
                for each in self.shard_clients
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the same worker. Call `begin` afterwards, which advances `step` if servers are ahead."""
        self.step = int(state["step"])
        self._membership.announcements = int(state.get("announcements", self._membership.announcements))
        self._gathered, self._unanswered, self._sent = None, (), None
        for each, saved in zip(self.shard_clients, state["states"], strict=True):
            for own, peer_value in zip(each.states, saved, strict=True):
                for key, packed in own.items():
                    packed.flat.copy_(peer_value[key])
            each.replica.version = -1  # servers may have been restored as well


# -- membership: agree, join, leave, and the barrier at which all workers have left ------------------------------------


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
