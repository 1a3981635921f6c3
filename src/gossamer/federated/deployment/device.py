"""Federation device: one process that joins a federation, trains when it is chosen, and sends its contribution."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies.federated_rules import LocalPrivacy
from gossamer.base.host_port import Address
from gossamer.base.peer_ops import (
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    Push,
    Receipt,
    Stamp,
    stopped_seconds,
)
from gossamer.base.units import seconds_text
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import CheckpointError, ConnectError, GossamerError, PeerLost
from gossamer.federated.client.functions import ScriptFile
from gossamer.federated.client.local_training import Trainer
from gossamer.federated.client.script import ClientRecipe, Train, participate
from gossamer.federated.client.store import ClientStore, DirectoryStore, MemoryStore
from gossamer.federated.deployment import limits
from gossamer.federated.deployment.files import FolderLock, replace_file
from gossamer.federated.deployment.reception import (
    DEVICE,
    JOIN,
    LEAVE,
    RUN,
    UNKNOWN,
    Invitation,
    JoinRequest,
)
from gossamer.federated.deployment.report import Line
from gossamer.federated.federation import recipe_terms
from gossamer.federated.messages import NOT_COUNTED, REPORT, THE_SERVER, Fate, decode, encode
from gossamer.federated.model_state import ModelState
from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster

IDENTITY_BITS = 62  # fits into a signed 64-bit integer


def new_identity() -> int:
    return secrets.randbits(IDENTITY_BITS)


class DeviceDirectory:
    """DIRECTORY/device holds the identity; DIRECTORY/FEDERATION/ holds the device's state in each federation."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if another process uses the directory, or it cannot be written."""
        self._directory = directory
        self._lock = FolderLock(
            directory,
            "Two devices would send each other's contributions: end it, or give this one a folder of its own: --state "
            "OTHER",
        )
        self.identity = self._identity()

    def store(self, federation: str, number: int) -> DirectoryStore:
        return DirectoryStore(self._directory / federation, number)

    def stores(self) -> list[DirectoryStore]:
        """Its state in every federation so far."""
        found = sorted(self._directory.glob("*/client-*.safetensors"))
        return [DirectoryStore(path.parent, int(path.stem.removeprefix("client-"))) for path in found]

    def close(self) -> None:
        self._lock.close()

    def _identity(self) -> int:
        path = self._directory / "device"
        try:
            return int(path.read_text(encoding="utf-8"), 16) % (1 << IDENTITY_BITS)
        except FileNotFoundError:
            drawn = new_identity()
            replace_file(path, f"{drawn:x}\n")
            return drawn
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}), so the identity of this device is lost. Remove {self._directory}: "
                "the device then joins as a new one with empty residuals"
            ) from error


FIRST_WORD_SECONDS = 5.0  # without a first connection, before the device prints a line


class ClosableEndpoint(Protocol):
    """The methods of an endpoint that ServerLink uses."""

    def answer(self, op: Await) -> PeerEvent: ...

    def close(self, why: GossamerError | None = None) -> None: ...


class ServerLink:
    """A thread that watches the connection of a device's endpoint. name: of the server, as the user wrote it."""

    def __init__(self, endpoint: ClosableEndpoint, name: str, print_text: Line, give_up_seconds: float) -> None:
        self._endpoint, self._name, self._print, self._give_up = endpoint, name, print_text, give_up_seconds
        threading.Thread(target=self._watch, name="gossamer link", daemon=True).start()

    def _watch(self) -> None:
        lost_at, notified = time.monotonic(), False
        since = lost_at
        try:
            while True:
                due = lost_at + (self._give_up if notified else min(FIRST_WORD_SECONDS, self._give_up))
                event = self._endpoint.answer(Await(until=due))
                lost_at += stopped_seconds(event, since, due)
                since = event.moment
                match event:
                    case PeerJoined():
                        if notified:
                            self._print(f"connected to {self._name}")
                        lost_at, notified = inf, False
                    case PeerLeft(moment=moment):
                        lost_at = moment
                    case Elapsed(moment=moment) if moment >= lost_at + self._give_up:
                        self._endpoint.close(self._gave_up())
                        return
                    case Elapsed():
                        notified = True
                        self._print(f"{self._name} does not answer; trying again until it does")
        except GossamerError:  # the endpoint was closed
            return

    def _gave_up(self) -> PeerLost:
        return PeerLost(
            f"{self._name} did not answer for {seconds_text(self._give_up)}, so this device has left. Start it again "
            "once the server is running: with --state it continues from its state"
        )


FAREWELL_SECONDS = 0.7  # to notify the server of leaving, and again to send queued messages


class Forgotten(GossamerError):
    """The server does not know this device: it was restarted without its journal, or the device has not joined."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Timing of a device's connection."""

    heartbeat_seconds: float = 15.0  # interval without other messages: routers drop silent connections
    silent_seconds: float = 60.0  # without a message of the server, before the device reconnects
    longest_backoff_seconds: float = 10.0  # between two attempts to connect
    give_up_seconds: float = 3600.0  # without a connection, before the device leaves


class FederationDevice:
    """One device of a federation. Call `run` to train until the federation has ended.

    Args:
        script: the user's functions.
        server: its address.
        token: the federation's secret.
        tls: encryption of the connection.
        number: the client number to request; None: its number in the roster, or else chosen by the server.
        directory: folder of its identity and state, so that a restarted process is the same device; None: in memory.
        identities: of all devices. With `identity`, the device sends masked contributions only, under any recipe.
        identity: this device's private key.
        recipe: the only recipe that the device accepts; None: any recipe of the server.
        options: timing of the connection.
        `print_text`: prints a progress line.

    Raises:
        RecipeError: invalid recipe.
        CheckpointError: the directory is in use or damaged.
        ConnectError: the server's address is unknown.
    """

    def __init__(
        self,
        script: ScriptFile,
        server: Address,
        *,
        token: bytes,
        tls: Tls | None = None,
        number: int | None = None,
        directory: Path | None = None,
        identities: IdentityRoster | None = None,
        identity: Identity | None = None,
        recipe: str | Recipe | None = None,
        options: DeviceOptions | None = None,
        print_text: Line = lambda text: None,
    ) -> None:
        options = options or DeviceOptions()
        if number is None and identities is not None and identity is not None:
            number = _enrolled(identities, identity)
        self._script, self._number, self._print = script, number, print_text
        self._identities, self._identity = identities, identity
        self._recipe = None if recipe is None else recipe_terms(recipe).recipe
        self._model = script.model()
        self._state = ModelState.of(self._model)
        self._directory = None if directory is None else DeviceDirectory(directory)
        self._stores: dict[tuple[str, int], ClientStore] = {}
        device = new_identity() if self._directory is None else self._directory.identity
        self._endpoint = TcpEndpoint(
            Credentials(
                me=Peer(DEVICE, device),
                token=token,
                run=RUN,
                layout=self._state.fingerprint,
                largest_frame_bytes=limits.largest_frame_bytes(self._state),
            ),
            EndpointOptions(
                tls=tls,
                dead_after_seconds=options.silent_seconds,
                heartbeat_seconds=options.heartbeat_seconds,
                longest_backoff_seconds=options.longest_backoff_seconds,
                gone_when_closed=True,
                handshake_seconds=limits.HANDSHAKE_SECONDS,
                goodbye_seconds=FAREWELL_SECONDS,
            ),
        )
        self._endpoint.meet({THE_SERVER: server})
        ServerLink(self._endpoint, f"{server[0]}:{server[1]}", print_text, options.give_up_seconds)

    def run(self) -> int:
        """Train until the federation has ended.

        Returns:
            Number of contributions that were counted.

        Raises:
            ConnectError or MismatchError: the server refused this device, or its recipe or roster does not fit.
            PeerLost: the server did not answer for `give_up_seconds`.
        """
        while True:
            invitation = self._join()
            try:
                counted = self._take_part(invitation)
            except Forgotten:
                self._print("the server was restarted without its journal; joining again")
                continue
            except ConnectError:  # the recipe or roster does not fit: free the number for another device
                self.leave()
                raise
            self.leave()
            return counted

    def leave(self) -> None:
        """Leave the federation, so that the server does not wait for this device, and disconnect. At most 1.5 s."""
        farewell = Push(to=THE_SERVER, key=LEAVE, stamp=Stamp(0, 0), within_seconds=FAREWELL_SECONDS)
        with suppress(GossamerError):  # the server detects the closed connection
            self._endpoint.answer(farewell)
        self.close()

    def close(self) -> None:
        self._endpoint.close()
        if self._directory is not None:
            self._directory.close()

    def _join(self) -> Invitation:
        request = Push(to=THE_SERVER, key=JOIN, stamp=Stamp(0, 0), about=encode(JoinRequest(number=self._number)))
        receipt: Receipt = self._endpoint.answer(request)
        invitation = decode(receipt.about, Invitation, THE_SERVER)
        if invitation.refused:
            raise ConnectError(f"The server refused this device. {invitation.refused}")
        self._print(f"joined as client {invitation.number} of {invitation.clients}: {invitation.recipe}")
        return invitation

    def _take_part(self, invitation: Invitation) -> int:
        terms = recipe_terms(invitation.recipe)
        self._check_recipe(terms.recipe)
        self._check_masks(invitation, terms.strategy.secure is not None)
        recipe = ClientRecipe(
            strategy=terms.strategy,
            compressor=terms.compressor,
            pull=terms.pull,
            state=self._state,
            seed=invitation.seed,
            part_bytes=invitation.part_bytes,
            roster=self._identities,
            identity=self._identity,
        )
        self._print("waiting until enough devices have joined and this one is chosen")
        trainer = Trainer(self._model, self._state, terms.strategy, self._script.train)
        store = self._store(invitation)
        if isinstance(terms.strategy.privacy, LocalPrivacy):
            self._count_all_noise(store)
        script = participate(invitation.number, recipe, store)
        return self._answered(script, trainer)

    def _check_recipe(self, offered: Recipe) -> None:
        if self._recipe is not None and repr(offered) != repr(self._recipe):
            raise ConnectError(
                f"The server's recipe is {offered!r}, but this device accepts only {self._recipe!r}, so it sends "
                "nothing. Ask the operator of the server why they differ, or agree on a recipe: --recipe TEXT"
            )

    def _check_masks(self, invitation: Invitation, masked: bool) -> None:
        if self._identities is None or self._identity is None:
            return
        if not masked:
            raise ConnectError(
                f"The server's recipe {invitation.recipe} has no masks, but this device has a roster, so it sends "
                "nothing. Start the server with secure=SecureAggregation(), or leave the roster out."
            )
        number, enrolled = invitation.number, _enrolled(self._identities, self._identity)
        if enrolled == number:
            return
        if enrolled is not None:
            raise ConnectError(
                f"The roster holds this device as client {enrolled}, but it joined as client {number}, so other "
                f"devices would reject it. Write --number {enrolled}, or leave --number out."
            )
        if number in self._identities.keys:
            raise ConnectError(
                f"The roster holds another device as client {number}, and does not hold this one, so other devices "
                "would reject it. Enroll it by a number that is free: gossamer federate enroll --number N "
                "--identity FILE"
            )
        line = self._identities.line(number, self._identity.public).strip()
        raise ConnectError(
            f"The roster does not hold this device as client {number}, so other devices would reject it. Add this line "
            f"to the roster on every machine: {line}"
        )

    def _answered(self, script: Generator[Any, Any, int], trainer: Callable[[Train], Any]) -> int:
        answer: Any = None
        try:
            while True:
                op = script.send(answer)
                if isinstance(op, Train):
                    answer = trainer(op)
                    shown = "  ".join(f"{key} {value:.4g}" for key, value in answer.metrics.items())
                    self._print(f"round {op.task.round + 1}: trained {answer.work.samples} samples  {shown}".rstrip())
                    continue
                answer = self._endpoint.answer(op)
                if answer.about == UNKNOWN:
                    raise Forgotten("the server does not know this device")
                if isinstance(op, Push) and op.key == REPORT and answer.version == NOT_COUNTED:
                    why = decode(answer.about, Fate, THE_SERVER).refused or "it came too late"
                    self._print(f"round {op.stamp.step + 1}: not counted: {why}")
        except StopIteration as stop:
            return int(stop.value)
        finally:
            script.close()

    def _store(self, invitation: Invitation) -> ClientStore:
        key = invitation.federation, invitation.number
        if key not in self._stores:
            kept = self._directory
            self._stores[key] = MemoryStore() if kept is None else kept.store(*key)
        return self._stores[key]

    def _count_all_noise(self, store: ClientStore) -> None:
        """Continue the count of contributions with local noise from all federations of this device: a server that is
        not trusted, or has lost its journal, has another name, and would get as many again."""
        others = self._stores.values() if self._directory is None else self._directory.stores()
        told, state = max((each.load().told for each in others), default=0), store.load()
        if told > state.told:
            store.save(replace(state, told=told))


def _enrolled(roster: IdentityRoster, identity: Identity) -> int | None:
    """The device's number in the roster, if it is enrolled."""
    return next((client for client, key in roster.keys.items() if key == identity.public), None)
