"""Client script: a device pulls a task, trains, sends its contribution, and receives the receipt."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy, LocalWork
from gossamer.algorithms.strategies.federated_rules.base import Memory
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Pull, Push, Stamp
from gossamer.errors import AttachError, MalformedError, MismatchError, NotFinite
from gossamer.federated.client import contribution as contributions
from gossamer.federated.client.store import ClientState, ClientStore, PendingContribution
from gossamer.federated.messages import (
    GO_ON,
    LARGEST,
    PART_BYTES,
    REPORT,
    TASK,
    THE_SERVER,
    Report,
    Task,
    decode,
    deliver,
    encode,
)
from gossamer.federated.model_state import ModelState
from gossamer.federated.privacy.clipping_and_noise import private_report
from gossamer.federated.secure_aggregation.agreement import Agreement
from gossamer.federated.secure_aggregation.device import DeviceSecrets, masked_report, nothing_to_reveal, upload_masked
from gossamer.federated.secure_aggregation.fixed_point import fixed_point_of
from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster
from gossamer.train.parameter_server.delta_chain import Replica


@dataclass(frozen=True, kw_only=True)
class Train:
    """An op: train from these parameters. The runner decides where and when, and answers with Trained."""

    client: int
    task: Task
    anchor: Tensor  # (n,) the round's parameters; read-only
    shared: Memory  # other blocks that the server publishes; read-only
    memory: Memory  # the device's; read-only


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of local training."""

    flat: Tensor  # (n,) the trained parameters
    work: LocalWork
    metrics: dict[str, float]
    seconds: float = 0.0
    anchor: Tensor | None = None  # (n,) the round's parameters after rounding to the model's dtype; None: no rounding


@dataclass(frozen=True, kw_only=True)
class ClientRecipe:
    """Settings that all devices of a federation share, and the identity of this one."""

    strategy: FederatedStrategy
    compressor: Compressor
    pull: Compressor | None
    state: ModelState
    seed: int = 0
    part_bytes: int = PART_BYTES
    roster: IdentityRoster | None = None  # of all devices, if contributions are masked
    identity: Identity | None = None  # this device's; None: from the roster, in a simulation

    def enrolled(self, number: int) -> tuple[IdentityRoster, Identity]:
        """The roster, and this device's identity. Raises AttachError where either is missing."""
        identity = self.identity if self.identity is not None or self.roster is None else self.roster.identity(number)
        if self.roster is None or identity is None:
            raise AttachError(
                f"{self.strategy!r} masks contributions, but client {number} has no identity in the roster, or no "
                "roster. Nothing was sent. Join with --roster FILE --identity FILE: the same "
                "roster on every machine, and the identity with a public key in that roster."
            )
        return self.roster, identity


ClientScript = Generator[Any, Any, int]


def participate(number: int, recipe: ClientRecipe, store: ClientStore) -> ClientScript:
    """Run one device until the federation has ended.

    Yields peer ops and Train.

    Returns:
        Number of contributions since this start that were counted.

    Raises:
        MalformedError: the server sent an invalid message.
        AttachError: the recipe masks contributions, and the device has no identity.
    """
    return _Participant(number, recipe, store).take_part()


@dataclass(frozen=True)
class _Participant:
    """A device and the store of its state."""

    number: int
    recipe: ClientRecipe
    store: ClientStore

    def take_part(self) -> ClientScript:
        strategy = self.recipe.strategy
        if strategy.secure is not None:
            self.recipe.enrolled(self.number)
        counted = 0
        while True:
            state = self.store.load()
            if state.pending is not None:  # the device was restarted before the receipt
                counted += yield from self._deliver(state, begun=True)
                continue
            replica = self._replica(state)
            pulled = yield Pull(of=THE_SERVER, key=TASK, known=replica.version, at_least=state.round + 1)
            task = decode(pulled.about, Task, THE_SERVER)
            if task.lineage and task.lineage != state.lineage:  # the kept state belongs to another lineage
                begun, state = state, ClientState(lineage=task.lineage, told=state.told)  # privacy spent stays spent
                if begun.version >= 0:
                    self.store.save(state)
                    continue
            if task.refused:
                raise MismatchError(f"The server refused this device. {task.refused}")
            if task.finished:
                return counted
            if task.round <= state.round:  # two contributions under one stamp would weaken masks and noise
                raise MalformedError(f"{THE_SERVER} gave client {self.number} round {task.round} twice; it trains once")
            replica.update(replace(pulled, about=task.chain))
            anchor, *shared = [block.flat for block in replica.values]
            state = replace(state, version=replica.version, replica=(anchor, *shared))
            if strategy.stale_after is not None and state.version - state.residual_version > strategy.stale_after:
                state = replace(state, residuals=())
            self.store.save(state)
            named = dict(zip(strategy.shared_keys, shared, strict=True))
            memory = {key: state.memory.get(key, torch.zeros_like(anchor)) for key in strategy.memory_keys}
            train = Train(client=self.number, task=task, anchor=anchor, shared=named, memory=memory)
            counted += yield from self._contribute(state, train, (yield train))

    def _contribute(self, state: ClientState, train: Train, trained: Trained) -> Generator[Any, Any, bool]:
        """Encode and send a contribution. Returns whether it was counted."""
        strategy, task = self.recipe.strategy, train.task
        held = train.anchor if trained.anchor is None else trained.anchor
        blocks, memory = strategy.contribute(held - trained.flat, trained.work, train.shared, train.memory)
        if strategy.secure is not None or task.secure is not None:
            return (yield from self._contribute_masked(state, task, trained, blocks, memory))
        stamp = Stamp(self.number, task.round, task.version)
        report = Report(
            samples=trained.work.samples,
            steps=trained.work.steps,
            learning_rate=min(trained.work.learning_rate, LARGEST),
            metrics={name: value for name, value in trained.metrics.items() if abs(value) <= LARGEST},
            layout=self.recipe.state.fingerprint,
            train_seconds=round(trained.seconds, 4),
        )
        if strategy.privacy is not None:
            report = private_report(report, strategy.privacy)
        if not report.samples:  # private reports have samples=1 for every device
            return (yield from self._withdraw(replace(state, round=task.round), stamp, report))
        at = contributions.contribution_context(self.recipe.seed, self.number, task.round)
        try:
            encoded = contributions.encode(
                self.recipe.compressor,
                self.recipe.state.layout,
                blocks,
                replace(state, memory=dict(memory)),
                at,
                strategy.privacy,
            )
        except NotFinite as error:
            return (yield from self._withdraw(replace(state, round=task.round), stamp, report, str(error)))
        report = msgspec.structs.replace(report, counts=encoded.counts)
        pending = PendingContribution(stamp, report, encoded.payload, encoded.counted)
        state = replace(state, told=encoded.counted.told, pending=pending)
        self.store.save(state)
        return (yield from self._deliver(state))

    def _deliver(self, state: ClientState, begun: bool = False) -> Generator[Any, Any, bool]:
        """Send the pending contribution and save its outcome. Returns whether it was counted."""
        pending = state.pending
        assert pending is not None
        receipt = yield from deliver(pending.stamp, pending.report, pending.payload, self.recipe.part_bytes, begun)
        fate_version = receipt.version
        if fate_version == GO_ON:  # the secrets of that round are gone, and the cohort continues without this device
            fate_version = yield from nothing_to_reveal(pending.stamp)
        was_counted = fate_version >= 0
        self.store.save(pending.counted if was_counted else replace(state, round=pending.stamp.step, pending=None))
        return was_counted

    def _contribute_masked(
        self, state: ClientState, task: Task, trained: Trained, blocks: Sequence[Tensor], memory: Memory
    ) -> Generator[Any, Any, bool]:
        """Encode and mask a contribution, in phases with the rest of the cohort. Returns whether it was counted.

        The device itself requires masks by its recipe: a server that requests unmasked updates gets an error.

        Args:
            memory: of the strategy, once this contribution counts.
        """
        secure, layout = self.recipe.strategy.secure, self.recipe.state.fingerprint
        if secure is None or task.secure is None:
            raise MalformedError(f"{THE_SERVER} requested client {self.number}'s update unmasked; it was not sent")
        form = fixed_point_of(self.recipe.strategy, self.recipe.compressor, self.recipe.state, self.recipe.seed)
        agreement = Agreement.of(form, task.secure, task.round, task.version, layout)
        roster, identity = self.recipe.enrolled(self.number)
        stamp, report = Stamp(self.number, task.round, task.version), masked_report(layout)
        privacy, work = self.recipe.strategy.privacy, trained.work
        is_private = privacy is not None and privacy.on_device  # weights would reveal the number of samples
        try:
            encoded = form.encode(
                blocks,
                1.0 if is_private else self.recipe.strategy.weight(work, 0),
                1 if is_private else work.steps,
                agreement.ranges,
                survivors=agreement.survivors,
                client=self.number,
                index=task.round,
                residuals=state.residuals,
            )
        except NotFinite as error:
            return (yield from self._withdraw(replace(state, round=task.round), stamp, report, str(error)))
        counted = replace(
            state,
            round=task.round,
            residuals=encoded.residuals,
            residual_version=state.version,
            memory=dict(memory),
        )

        def keep(payload: Payload) -> None:
            self.store.save(replace(state, pending=PendingContribution(stamp, report, payload, counted)))

        fewest = agreement.survivors if is_private else 0
        secrets = DeviceSecrets(agreement, self.number, identity, roster, fewest)
        version = yield from upload_masked(secrets, stamp, report, encoded.integers, keep, self.recipe.part_bytes)
        self.store.save(counted if version >= 0 else replace(state, round=task.round, pending=None))
        return version >= 0

    def _withdraw(
        self, state: ClientState, stamp: Stamp, report: Report, failed: str = ""
    ) -> Generator[Any, Any, bool]:
        """Report without a contribution, so that the server does not wait: no data, or the training diverged."""
        report = msgspec.structs.replace(report, failed=failed[:300])
        yield Push(to=THE_SERVER, key=REPORT, stamp=stamp, about=encode(report))
        self.store.save(state)
        return False

    def _replica(self, state: ClientState) -> Replica:
        """The replica from the stored state, at version -1 if there is no state."""
        blocks = 1 + len(self.recipe.strategy.shared_keys)
        like = [
            FlatTensors.zeros(self.recipe.state.layout, dtype=self.recipe.state.dtype, device=torch.device("cpu"))
            for _ in range(blocks)
        ]
        replica = Replica(like, self.recipe.pull, self.recipe.seed, sender=str(THE_SERVER))
        if state.version >= 0 and len(state.replica) == blocks:
            replica.version = state.version
            for block, flat in zip(replica.values, state.replica, strict=True):
                block.flat.copy_(flat)
        return replica
