"""A worker's half: what it says to the servers, as scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.core.ops import Payload, payload_bytes
from gossamer.core.peer_ops import AtOnce, Peer, PeerScript, Pull, Pulled, Push, Receipt, Stamp
from gossamer.errors import GossamerError, LoopError, MalformedError, MismatchError, NotFinite, PeerLost
from gossamer.parameter_server.client.shard_client import ShardClient, shard_clients
from gossamer.parameter_server.client.step_result import Gathered, StepResult, Stopwatch, Told
from gossamer.parameter_server.deduplication import LATE
from gossamer.parameter_server.from_recipe import push_pull_codecs
from gossamer.parameter_server.shard_message import ShardCodec
from gossamer.parameter_server.shard_spec import options_of
from gossamer.parameter_server.update_policy import (
    AGREED,
    BEGIN,
    END,
    EXACT,
    GRADIENT,
    JOIN,
    LEAVE,
    PARAMETERS,
    STOP,
    TOGETHER,
)
from gossamer.recipes.recipe import Recipe
from gossamer.strategies.parameter_server import ASYNC

__all__ = ["Client", "StepResult", "Told"]


class Client:
    """Worker `worker` of `world`, whose parameters `tensors` live on `shards` servers.

    In the training thread: `gather` gradients, and `land` what came. In between, anywhere: a script, `begin` once and
    then `push_pull`, one at a time. step: of the contribution that is next.

    early: the next gradient is computed while push_pull goes on, so what that brings serves the one after. beside: the
    server in this worker's process, where there is one. within_seconds: of every word; None waits for as long as it
    takes. Raises AttachError for an optimizer that servers cannot make again.
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
        early: bool = False,
        beside: Peer | None = None,
        within_seconds: float | None = None,
    ) -> None:
        ways = push_pull_codecs(recipe)
        self.worker, self.step = worker, 0
        self.shares = shard_clients(
            tensors, optimizer, ways, recipe=repr(recipe), world=world, seed=seed, shards=ways.strategy.shards or shards
        )
        self._tensors, self._optimizer = tensors, optimizer
        self._waits, self._ahead = ways.strategy.mode != ASYNC, ways.strategy.rounds_ahead - early
        self._beside, self._within_seconds = beside, within_seconds
        self._gathered: Gathered | None = None
        self._unanswered: tuple[Push, ...] = ()
        self._finite = True
        self._end: tuple[Payload, ...] = ()
        self._words = 0
        self._watch = Stopwatch()
        self.stopping = False  # whether anybody wants the run to end

    # -- what the training thread does

    def gather(self, gradients: Mapping[str, Tensor | None], weight: float = 1.0) -> None:
        """Copy gradients by parameter name, and the optimizer's hyperparameters as they are now, for `push_pull`.

        A gradient that is None counts as zero. weight: in a mean over workers; 0 contributes nothing.
        """
        if self._unanswered:
            raise LoopError(
                f"step {self.step} was sent and nobody answered, so servers may have it or not, and another in its "
                "place would be taken for the same. Run push_pull() again first: it sends the same bytes."
            )
        for share in self.shares:
            share.gather(gradients)
        known = tuple(max(share.landed, 0) for share in self.shares)
        self._gathered = Gathered(options_of(self._optimizer), weight, known)

    def land(self) -> None:
        """Overwrite the parameters with what was pulled last."""
        for share in self.shares:
            share.land(self._tensors)

    def land_exact(self) -> None:
        """Overwrite the parameters with what `end` brought."""
        for share, values in zip(self.shares, self._end, strict=True):
            share.put(values, self._tensors)

    # -- scripts

    def begin(self) -> PeerScript:
        """Make sure that all servers hold their part, come to their parameters, and take part from now on.

        Worker 0 hands its parameters over, unless that was done; the others wait for it. Raises MismatchError where a
        server was begun with something else.
        """
        if self.worker == 0:
            receipts = yield AtOnce(
                tuple(
                    self._push(
                        share, BEGIN, Stamp(self.worker, 0), share.description.text(), share.values(self._tensors)
                    )
                    for share in self.shares
                )
            )
            _check(receipts, MismatchError)
        yield from self._agree()
        yield from self._join()
        yield from self.pull(self._clock)

    def push_pull(self) -> PeerScript:
        """Push what was gathered, wait until the rule allows the next step, and pull; returns StepResult.

        After PeerLost it may be run again: what was not answered is sent again, byte for byte.
        """
        self._watch.start()
        pushes = self._unanswered = self._unanswered or self._written()
        self._watch.lap("encode")
        receipts = yield AtOnce(pushes)
        self._unanswered = ()
        _check(receipts, MalformedError)
        step, self.step = self.step, self.step + 1
        applied = tuple(receipt.version for receipt in receipts)
        if LATE in applied:  # the others have gone on, perhaps far
            yield from self._join()
        received = yield from self.pull(self._clock)
        return StepResult(
            step=step,
            applied=applied,
            versions=tuple(share.copy.version for share in self.shares),
            bytes_sent=sum(payload_bytes(push.payload) for push in pushes if push.to != self._beside),
            bytes_received=received,
            finite=self._finite,
            **self._watch.seconds(),
        )

    def exact(self) -> PeerScript:
        """The parameters as they are on the servers now, uncompressed: returns fresh tensors by name."""
        found = {name: torch.empty_like(tensor) for name, tensor in self._tensors.items()}
        answers = yield AtOnce(tuple(self._ask(share, EXACT) for share in self.shares))
        _check(answers, MalformedError)
        for share, answer in zip(self.shares, answers, strict=True):
            share.put(answer.payload, found)
        return found

    def stop(self) -> PeerScript:
        """Let all workers hear, with their next parameters, that the run ends."""
        self.stopping = True
        yield self._push(self.shares[0], STOP, Stamp(self.worker, self.step))

    def leave(self) -> PeerScript:
        """Let nobody wait for this worker until it pushes again."""
        for some in self._last_the_first():
            stamp = self._attendance()
            yield AtOnce(tuple(self._push(share, LEAVE, stamp) for share in some))

    def end(self) -> PeerScript:
        """Leave, wait until all workers have left, and fetch what they have made together, for `land_exact`.

        Whoever pushes again takes part again. Returns what the servers tell.
        """
        yield from self.leave()
        answers: list[Pulled] = [(yield self._ask(self.shares[0], END))]
        # Who is known to have left there has left everywhere; to wait at two places would be to wait for each other.
        if others := self.shares[1:]:
            answers += yield AtOnce(tuple(self._ask(share, EXACT) for share in others))
        _check(answers, MalformedError)
        self._end = tuple(answer.payload for answer in answers)
        if self._waits:  # the next round is the same for all
            self.step = max(self.step, *(answer.version for answer in answers))
        told = max(map(_told, answers), key=lambda each: int(each["applied"]))
        ages = {int(age): int(count) for age, count in told["staleness"].items()}
        return Told(applied=int(told["applied"]), late=int(told["late"]), staleness=ages)

    def meet(self) -> PeerScript:
        """Wait until all workers are here, and go on together with those that do not end: between two epochs."""
        told = yield from self.end()
        yield from self._join()
        yield self._ask(self.shares[0], TOGETHER)
        yield from self.pull(self._clock)
        return told

    def _last_the_first(self) -> tuple[Sequence[ShardClient], ...]:
        """The shares in two parts. Workers meet at the first server: who is known there is known everywhere."""
        return tuple(some for some in (self.shares[1:], self.shares[:1]) if some)

    def _attendance(self) -> Stamp:
        """Of one more word about coming or going."""
        self._words += 1
        return Stamp(self.worker, self.step, self._words)

    @property
    def _clock(self) -> int:
        """Which clock servers must have reached before this worker computes its next step."""
        return max(self.step - self._ahead, 0) if self._waits else 0

    def _written(self) -> tuple[Push, ...]:
        """What was gathered, encoded; what the compressor remembers moves on, since it is as good as sent."""
        if self._gathered is None:
            raise LoopError("there is nothing to push: call gather(gradients) before each push_pull().")
        gathered, self._gathered = self._gathered, None
        stamps = [Stamp(self.worker, self.step, known) for known in gathered.known]
        bundles = self._bundles(stamps) if gathered.weight else None
        self._finite = bundles is not None or not gathered.weight
        if bundles is None:
            nothing = [share.about(gathered.options, 0.0, [0] * len(share.gradients)) for share in self.shares]
            given = zip(self.shares, stamps, nothing, strict=True)
            return tuple(self._push(share, GRADIENT, stamp, about) for share, stamp, about in given)
        pushes: list[Push] = []
        for share, stamp, each in zip(self.shares, stamps, bundles, strict=True):
            share.commit(each)
            about = share.about(gathered.options, gathered.weight, each.counts)
            pushes.append(self._push(share, GRADIENT, stamp, about, each.payload))
        return tuple(pushes)

    def _bundles(self, stamps: Sequence[Stamp]) -> list[ShardCodec] | None:
        """None where a number cannot be sent: then no server gets anything of this step."""
        try:
            return [share.write(stamp) for share, stamp in zip(self.shares, stamps, strict=True)]
        except NotFinite:
            return None

    def _push(self, share: ShardClient, key: str, stamp: Stamp, about: str = "", payload: Payload = ()) -> Push:
        return Push(
            to=share.peer,
            key=key,
            stamp=stamp,
            payload=tuple(tensor.cpu() for tensor in payload),
            about=about,
            within_seconds=self._within_seconds,
        )

    def _ask(self, share: ShardClient, key: str, at_least: int = 0) -> Pull:
        known = share.copy.version
        return Pull(of=share.peer, key=key, known=known, at_least=at_least, within_seconds=self._within_seconds)

    def pull(self, at_least: int = 0) -> PeerScript:
        """Come to what the servers have, once they have reached clock `at_least`; returns the payload bytes that came.

        To have what all workers pushed, let each pull(client.step) at the end.
        """
        pulled = yield AtOnce(tuple(self._ask(share, PARAMETERS, at_least) for share in self.shares))
        self._watch.lap("wire")
        _check(pulled, MalformedError)
        for share, each in zip(self.shares, pulled, strict=True):
            share.copy.take(each)
        self.stopping = self.stopping or any(_told(each).get("stop", False) for each in pulled)
        self._watch.lap("decode")
        apart = (each for share, each in zip(self.shares, pulled, strict=True) if share.peer != self._beside)
        return sum(payload_bytes(each.payload) for each in apart)

    def _agree(self) -> PeerScript:
        """Wait until all servers hold something, which must be what this worker trains."""
        answers = yield AtOnce(tuple(self._ask(share, AGREED) for share in self.shares))
        for share, answer in zip(self.shares, answers, strict=True):
            if answer.about != share.description.agreed():
                raise MismatchError(
                    f"{share.peer} was begun with {answer.about}, and worker {self.worker} runs "
                    f"{share.description.agreed()}. Run the same script with the same recipe on every worker."
                )

    def _join(self) -> PeerScript:
        """Agree with all servers on the step that is next: one that none of them has left behind."""
        late = [{"least": self.step}]
        while late:
            self.step, late = max(int(each["least"]) for each in late), []
            for some in self._last_the_first():
                stamp = self._attendance()
                receipts = yield AtOnce(
                    tuple(self._push(share, JOIN, stamp, share.description.agreed()) for share in some)
                )
                _check(receipts, MismatchError)
                late += [_told(receipt) for receipt in receipts if receipt.version == LATE]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What this worker remembers beside its parameters; views."""
        return {
            "step": self.step,
            "states": [
                [{key: packed.flat for key, packed in state.items()} for state in share.states] for share in self.shares
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The state of the same worker; to be followed by `begin`, which moves `step` on where servers are ahead."""
        self.step = int(state["step"])
        for share, saved in zip(self.shares, state["states"], strict=True):
            for mine, theirs in zip(share.states, saved, strict=True):
                for key, packed in mine.items():
                    packed.flat.copy_(theirs[key])


def _told(answer: Receipt | Pulled) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(answer.about or "{}")
    return told


def _check(answers: Sequence[Receipt | Pulled], error: type[GossamerError]) -> None:
    """Raise what a server refused."""
    for told in map(_told, answers):
        if "refused" in told:
            raise error(f"A parameter server refused what this worker sent: {told['refused']}")
        if "forgot" in told:
            raise PeerLost(
                "A parameter server came back and remembers nothing, so this run cannot go on from what its workers "
                "have. Give the servers a directory, in which they keep a journal."
            )
