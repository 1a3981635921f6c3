"""Periodic client: sends the change of several local steps to each server, and keeps those since it was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import AtOnce, PeerScript, Push, Stamp
from gossamer.errors import MalformedError, NotFinite, RecipeError
from gossamer.train.engine.bucket import assign_fragments
from gossamer.train.parameter_server.client.client import Client
from gossamer.train.parameter_server.client.requests import about, check
from gossamer.train.parameter_server.client.step_result import StepResult, StepTimer
from gossamer.train.parameter_server.delayed_nesterov import DelayedNesterov
from gossamer.train.parameter_server.shard_spec import ELASTIC
from gossamer.train.parameter_server.update_policy import GRADIENT, PARAMETERS


@dataclass
class UnsentChange:
    """A worker's local training since its last messages to one server, by fragment."""

    anchors: list[FlatTensors] = field(default_factory=list)  # by block, the parameters before it
    steps: dict[int, int] = field(default_factory=dict)
    samples: dict[int, float] = field(default_factory=dict)
    since: int = 0  # local steps since the last message of any fragment
    awaits: bool = False  # the last message is not answered
    finite: bool = True  # the last message contained its change

    def count(self, samples: float) -> None:
        self.since += 1
        for fragment in self.steps:
            self.steps[fragment] += 1
            self.samples[fragment] += samples

    def take(self, fragment: int) -> tuple[int, float]:
        """Return the steps and samples of a fragment's change, and begin its next one."""
        taken = self.steps[fragment], self.samples[fragment]
        self.steps[fragment], self.samples[fragment] = 0, 0.0
        return taken


class PeriodicClient(Client):
    """Worker of AsyncDiLoCo.

    Each server has its own messages, since servers merge in different orders: a worker that waited for all servers
    could wait at one server for a worker that waits at another one.

    On the training thread, call `count` after each local step, then `take_up` for each server whose exchange has ended,
    then `exchange` for each server in `due()`, and run the script on another thread. At the end, once the pushes of all
    exchanges are answered: `send_rest`, `end` and `apply_final`.

    Raises:
        AttachError: the quorum is above the number of workers, or there are fewer tensors than fragments.
    """

    def __init__(self, worker: int, world: int, tensors: Mapping[str, Tensor], recipe: Recipe, **options: Any) -> None:
        strategy = recipe.strategy
        if not isinstance(strategy, AsyncDiLoCo):
            raise RecipeError(f"{recipe} has no local steps between messages to servers. Write AsyncDiLoCo(period=24).")
        if world != ELASTIC:
            strategy.check_workers(world)
        fragments: list[dict[str, Any]] = assign_fragments(tensors, strategy.fragments)  # type: ignore[arg-type]
        outer = DelayedNesterov(
            [{"params": list(part.values())} for part in fragments],
            lr=strategy.outer_learning_rate,
            momentum=strategy.outer_momentum,
        )
        super().__init__(worker, world, tensors, outer, recipe, **options)
        self._period = strategy.period
        self._stride = 1 + sum(len(each.spec.fragments) for each in self.shard_clients)  # numbers per local step
        self.local_steps = 0  # of this worker; for one that returns, those before its last message
        self._unsent = [UnsentChange() for _ in self.shard_clients]
        for each, unsent in zip(self.shard_clients, self._unsent, strict=True):
            unsent.steps, unsent.samples = (
                dict.fromkeys(each.spec.fragments, 0),
                dict.fromkeys(each.spec.fragments, 0.0),
            )

    def begin(self) -> PeerScript:
        yield from super().begin()
        self.local_steps = max(self.local_steps, self.step // self._stride)

    # -- on the training thread

    def apply_pull(self) -> None:
        """Overwrite the parameters with the last pulled values, without local changes."""
        super().apply_pull()
        self.keep_changes()

    def keep_changes(self) -> None:
        """Measure changes from the last pulled values on; the parameters may differ from them already."""
        for each, unsent in zip(self.shard_clients, self._unsent, strict=True):
            unsent.anchors, each.applied_version = each.anchors(), each.replica.version

    def count(self, samples: float = 1.0) -> None:
        """Count a local step. Messages are numbered by it, with room for one of each fragment to each server."""
        self.local_steps += 1
        self.step = max(self.step, self.local_steps * self._stride)
        for unsent in self._unsent:
            unsent.count(samples)

    def due(self) -> list[int]:
        """The servers to which this worker sends now."""
        return [
            number
            for number, unsent in enumerate(self._unsent)
            if not unsent.awaits and unsent.since * len(unsent.steps) >= self._period
        ]

    def take_up(self, number: int) -> None:
        """Adopt the parameters of an exchange that has ended, plus the local change since it began."""
        unsent = self._unsent[number]
        self.shard_clients[number].take_up(self._tensors, unsent.anchors, keep_change=unsent.finite)
        unsent.awaits = False

    def exchange(self, number: int, received: Callable[[], None] = lambda: None) -> PeerScript:
        """Take the change of the next fragment. Returns a script that sends it, and pulls the merged parameters once
        they contain it; the script returns StepResult.

        Args:
            received: called once the server has received the change; the gradient buffer is free then.
        """
        fragment, unsent = self._next_fragment(number), self._unsent[number]
        unsent.since, unsent.awaits = 0, True
        return self._exchange(number, received, *self._take(number, fragment))

    def _next_fragment(self, number: int) -> int:
        """The fragment with the largest number of unsent steps at a server, so that each is sent in turn.

        Among equal ones, as for a worker that returns, it is the one that a server merges next if all workers send in
        the same order.
        """
        steps, fragments = self._unsent[number].steps, self.shard_clients[number].spec.fragments
        first = max(self.shard_clients[number].applied_version, 0) % len(fragments)
        return max((*fragments[first:], *fragments[:first]), key=lambda fragment: steps[fragment])

    def _take(self, number: int, fragment: int) -> tuple[int, Stamp, int, float]:
        each, unsent = self.shard_clients[number], self._unsent[number]
        each.take_change(self._tensors, unsent.anchors, fragment)
        stamp = Stamp(self._worker, self.step, max(each.applied_version, 0))
        self.step += 1
        return fragment, stamp, *unsent.take(fragment)

    # -- scripts

    def _exchange(
        self, number: int, received: Callable[[], None], fragment: int, stamp: Stamp, steps: int, samples: float
    ) -> PeerScript:
        each, timer = self.shard_clients[number], StepTimer()
        push = self._push_of(number, fragment, stamp, steps, samples)
        timer.lap("encode")
        receipt = yield push
        check([receipt], MalformedError)
        received()
        pulled = yield self._requests.pull(each, PARAMETERS, at_least=max(receipt.version, 0))
        timer.lap("wire")
        check([pulled], MalformedError)
        each.replica.update(pulled)
        self.stopping = self.stopping or about(pulled).get("stop", False)
        timer.lap("decode")
        is_remote = each.peer != self._local_server
        return StepResult(
            step=stamp.step,
            applied=(receipt.version,),
            versions=(each.replica.version,),
            bytes_sent=is_remote * payload_bytes(push.payload),
            bytes_received=is_remote * payload_bytes(pulled.payload),
            finite=self._unsent[number].finite,
            **timer.seconds(),
        )

    def settle(self) -> PeerScript:
        """Wait until all workers call it; the servers then merge all that was sent, and answer the exchanges."""
        yield from self._membership.barrier()

    def send_rest(self) -> PeerScript:
        """Push all changes that were not sent, without waiting for their merges. Returns the payload bytes sent."""
        nbytes = 0
        for place in range(max(len(unsent.steps) for unsent in self._unsent)):
            pushes = []
            for number, each in enumerate(self.shard_clients):
                fragment = each.spec.fragments[place] if place < len(each.spec.fragments) else None
                if fragment is not None and self._unsent[number].steps[fragment]:
                    pushes.append(self._push_of(number, *self._take(number, fragment)))
            receipts = yield AtOnce(tuple(pushes))
            check(receipts, MalformedError)
            nbytes += sum(payload_bytes(push.payload) for push in pushes if push.to != self._local_server)
        return nbytes

    def _push_of(self, number: int, fragment: int, stamp: Stamp, steps: int, samples: float) -> Push:
        """Encode the gradient buffer; nothing, with weight 0, if a value is not finite."""
        each, unsent = self.shard_clients[number], self._unsent[number]
        options = each.spec.groups
        try:
            message, unsent.finite = each.encode(stamp, options, fragment), True
        except NotFinite:
            message, unsent.finite, samples = each.empty_message(fragment), False, 0.0
        if not samples:
            message = each.empty_message(fragment)
        each.commit(message)
        header = each.about(options, samples, message.counts, fragment=fragment, steps=steps)
        return self._requests.push(each, GRADIENT, stamp, header, message.payload)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """In addition, the counts of unsent changes. Call it while no exchange is in progress, after `take_up`."""
        changes = [{"steps": each.steps, "samples": each.samples, "since": each.since} for each in self._unsent]
        return {**super().state_dict(), "unsent": changes, "local_steps": self.local_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Call `begin` and `keep_changes` afterwards."""
        super().load_state_dict(state)
        self.local_steps = int(state["local_steps"])
        for each, saved in zip(self._unsent, state["unsent"], strict=True):
            each.steps = {int(fragment): int(count) for fragment, count in saved["steps"].items()}
            each.samples = {int(fragment): float(samples) for fragment, samples in saved["samples"].items()}
            each.since, each.awaits, each.finite = int(saved["since"]), False, True
