"""Virtual federation: runs one server script and many devices' scripts in virtual time, by an event queue.

Only chosen devices have a live script. A waiting device is only its unanswered request, and a device that was never
chosen has no state, so the cost of a round does not depend on the number of other devices. The work of a device between
two messages runs at once and takes virtual time by its profile: training by steps, transfers by payload bytes. A device
leaves when its availability ends or when it fails. Its script is closed, and restarted when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import inf
from random import Random
from typing import Any

from gossamer.base import rng
from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import (
    Arrived,
    Ask,
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerLeft,
    Pull,
    Push,
    Reply,
)
from gossamer.base.virtual_clock import VirtualClock
from gossamer.errors import GossamerError, PeerLost
from gossamer.federated.client.script import ClientRecipe, ClientScript, Train, participate
from gossamer.federated.client.store import MemoryStore
from gossamer.federated.messages import CLIENT, TASK
from gossamer.federated.population import DeviceProfile
from gossamer.federated.population.profiles import DAY_SECONDS, presence
from gossamer.federated.server.rounds import Rounds, serve
from gossamer.federated.virtual.device_states import DeviceStates
from gossamer.federated.virtual.training import DeviceTraining

FAILURE_SECONDS = 600.0  # until a failed device returns
PATIENCE_SECONDS = 30 * DAY_SECONDS  # without a version
PATIENCE_ROUNDS = 10_000  # given up in a row: with an instant network they take no virtual time


class ByteCounts:
    """Payload bytes by client."""

    def __init__(self) -> None:
        self.up: dict[int, int] = {}
        self.down: dict[int, int] = {}


class VirtualFederation:
    """The server, the devices, and the clock. profile: from a device's number to its profile, a pure function."""

    def __init__(
        self,
        rounds: Rounds,
        recipe: ClientRecipe,
        training: DeviceTraining,
        states: DeviceStates,
        profile: Callable[[int], DeviceProfile] = lambda client: DeviceProfile(),
    ) -> None:
        self.clock, self.counted, self.events = VirtualClock(), ByteCounts(), 0
        self.failures: dict[int, GossamerError] = {}
        self.stopping = False  # set it to end after the current event
        self._rounds, self._recipe, self._training, self._states = rounds, recipe, training, states
        self._profile = profile
        self._server = serve(rounds)
        self._due: float | None = None
        self._numbers = count(1)
        self._asked: dict[int, int] = {}  # by token: the device that waits for its answer
        self._tokens: dict[int, int] = {}  # by device: its token
        self._live: dict[int, ClientScript] = {}
        self._stays: dict[int, int] = {}  # by device: how often it left, to recognize events of an earlier stay
        self._leaves: dict[int, float] = {}  # by live device: end of its availability
        self._sending: dict[int, tuple[int, float]] = {}  # by device: the bytes in transit, and since when
        self._untrained: dict[int, tuple[Train, float]] = {}  # by device: its pending training, and since when
        self._new: Pull = next(participate(0, recipe, MemoryStore()))  # of a device that was never chosen
        self._last_version, self._last_round = 0.0, 0

    @property
    def live(self) -> int:
        """Number of devices with a script."""
        return len(self._live)

    def run(self) -> None:
        """Run until the federation has ended, or `stopping`. Raises PeerLost if it cannot end, and exceptions of the
        user's function."""
        self._step(next(self._server))
        for client in range(self._rounds.clients):
            self._come(client)
        while not self.stopping and not self._rounds.finished:
            if not self.clock.run_next() or self._is_stuck():
                raise self._stuck()
            self.events += 1

    def committed(self) -> ByteCounts:
        """A version was made. Returns the bytes since the previous version."""
        self._last_version, self._last_round = self.clock.now, self._rounds.next_round
        found, self.counted = self.counted, ByteCounts()
        return found

    def close(self) -> None:
        """Close all scripts."""
        for script in (*self._live.values(), self._server):
            script.close()
        self._live.clear()

    def _is_stuck(self) -> bool:
        given_up = self._rounds.next_round - self._last_round
        is_late = self.clock.now > self._last_version + PATIENCE_SECONDS or given_up > PATIENCE_ROUNDS
        return is_late or self._too_few_can()

    def _too_few_can(self) -> bool:
        return self._rounds.attempts.leave_too_few(self.failures)

    def _stuck(self) -> PeerLost:
        rounds, first = self._rounds, next(iter(self.failures.items()), None)
        why = [rounds.attempts.summary()]
        if first is not None:
            failed = f"{len(self.failures)} of {rounds.clients} devices failed permanently."
            why.append(f"{failed} The first: client {first[0]}: {first[1]}")
        if not self._too_few_can():
            given_up = rounds.next_round - self._last_round
            why.append(
                f"{len(self._asked)} of {rounds.clients} devices are available after {self.clock.now / 3600:.1f} "
                f"virtual hours, {given_up} rounds were given up, and a round needs more. Lower the recipe's fraction, "
                "or give the profiles longer availability."
            )
        stuck = PeerLost(" ".join([f"Version {rounds.model.version + 1} cannot be made.", *filter(None, why)]))
        stuck.__cause__ = None if first is None else first[1]
        return stuck

    # The server.

    def _deliver(self, event: PeerEvent) -> None:
        self._step(self._server.send(event))

    def _step(self, op: Any) -> None:
        """Advance the server's script until it waits."""
        while True:
            match op:
                case Reply():
                    self._answer(op)
                    op = self._server.send(None)
                case Await(until=until) if until is not None and until <= self.clock.now:
                    op = self._server.send(Elapsed(moment=self.clock.now))
                case Await(until=until):
                    if until is not None and until != self._due:
                        self.clock.at(until, self._elapsed, until)
                    self._due = until
                    return
                case _:
                    raise TypeError(f"the server yielded {op!r}, which is not an op of a server")

    def _elapsed(self, until: float) -> None:
        if self._due == until:
            self._deliver(Elapsed(moment=self.clock.now))

    def _answer(self, reply: Reply) -> None:
        client = self._asked.pop(reply.token, None)
        if client is None or (self._rounds.finished and client not in self._live):
            return  # it has left, or the answer would only end it
        del self._tokens[client]
        if client not in self._live:
            self._live[client] = script = participate(client, self._recipe, self._states.of(client))
            self._leaves[client] = presence(self._profile(client), self.clock.now)[1]
            next(script)  # the request that is answered now
        nbytes = payload_bytes(reply.answer.payload)
        self.counted.down[client] = self.counted.down.get(client, 0) + nbytes
        self._resume(client, reply.answer, self.clock.now + self._profile(client).down_seconds(nbytes))

    # Devices.

    def _come(self, client: int) -> None:
        begins, ends = presence(self._profile(client), self.clock.now)
        if begins > self.clock.now:
            self.clock.at(begins, self._come, client)
            return
        if ends < inf:
            self.clock.at(ends, self._leave, client, self._stay(client))
        if not self._states.known(client):
            self._ask(client, self._new, self.clock.now)
            return
        self._live[client] = script = participate(client, self._recipe, self._states.of(client))
        self._leaves[client] = ends
        self._issue(client, next(script), self.clock.now)  # a request for a task, or its pending contribution

    def _stay(self, client: int) -> int:
        return self._stays.get(client, 0)

    def _leave(self, client: int, stay: int, away_seconds: float = 0.0) -> None:
        if self._stay(client) != stay:
            return
        self._stays[client] = stay + 1
        self._count_sent(client)
        self._forget(client)
        self._asked.pop(self._tokens.pop(client, 0), None)
        if away_seconds < inf:
            self.clock.after(away_seconds, self._come, client)
        self._deliver(PeerLeft(moment=self.clock.now, peer=Peer(CLIENT, client)))

    def _forget(self, client: int) -> None:
        """Close a device's script."""
        op, _ = self._untrained.pop(client, (None, 0.0))
        if op is not None:
            self._training.forget(op)
        self._leaves.pop(client, None)
        script = self._live.pop(client, None)
        if script is not None:
            script.close()

    def _resume(self, client: int, answer: Any, moment: float) -> None:
        """Give a device an answer that arrives at `moment`, now or later."""
        if moment > self._leaves[client]:
            return  # it leaves before the answer arrives
        try:
            op = self._live[client].send(answer)
        except GossamerError as error:
            self.failures[client] = error
            self.clock.at(moment, self._leave, client, self._stay(client), inf)
            return
        self._issue(client, op, moment)

    def _issue(self, client: int, op: Any, moment: float) -> None:
        match op:
            case Train():
                self._begin_training(client, op, moment)
            case Pull(key=key) if key == TASK:
                self._forget(client)
                self._ask(client, op, moment)
            case Pull() | Push():
                self._ask(client, op, moment)
            case _:
                raise TypeError(f"client {client} yielded {op!r}, which is not an op of a device")

    def _ask(self, client: int, op: Ask, moment: float) -> None:
        nbytes = payload_bytes(op.payload) if isinstance(op, Push) else 0
        self._sending[client] = nbytes, moment
        self.clock.at(moment + self._profile(client).up_seconds(nbytes), self._arrive, client, self._stay(client), op)

    def _arrive(self, client: int, stay: int, op: Ask) -> None:
        if self._stay(client) != stay:
            return
        self._count_sent(client)
        token = next(self._numbers)
        self._asked[token], self._tokens[client] = client, token
        self._deliver(Arrived(moment=self.clock.now, token=token, sender=Peer(CLIENT, client), op=op))

    def _count_sent(self, client: int) -> None:
        """Count bytes that have arrived or are lost, if the device had begun to send them."""
        nbytes, moment = self._sending.pop(client, (0, 0.0))
        if nbytes and moment <= self.clock.now:
            self.counted.up[client] = self.counted.up.get(client, 0) + nbytes

    # Training is deferred until the first result is due, so that many devices are trained together.

    def _begin_training(self, client: int, op: Train, moment: float) -> None:
        profile, stay = self._profile(client), self._stay(client)
        steps = self._training.fewest_steps(op)
        soonest = moment + profile.training_seconds(steps)
        if profile.failure and _fails(profile, self._recipe.seed, client, op.task.round, stay):
            self._training.forget(op)
            self.clock.at(soonest, self._leave, client, stay, FAILURE_SECONDS)
            return
        self._untrained[client] = op, moment
        self.clock.at(soonest, self._train, client, op)

    def _train(self, client: int, op: Train) -> None:
        """Train all pending devices, if this one is still pending."""
        if self._untrained.get(client, (None,))[0] is not op:
            return
        together, self._untrained = self._untrained, {}
        found = self._training.train([op for op, _ in together.values()])
        for (client, (_, moment)), trained in zip(together.items(), found, strict=True):
            ended = max(moment + self._profile(client).training_seconds(trained.work.steps), self.clock.now)
            self._resume(client, replace(trained, seconds=ended - moment), ended)


def _fails(profile: DeviceProfile, seed: int, client: int, index: int, stay: int) -> bool:
    return Random(rng.address(seed, "failure", client, index, stay)).random() < profile.failure
