"""Federation device: one process that joins a federation, trains when it is chosen, and sends what it learned."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.peer_ops import Peer, Push, Receipt, Stamp
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc.sockets import Address, Tls
from gossamer.comm.wire.authentication import Credentials
from gossamer.errors import ConnectError, GossamerError
from gossamer.federated.client.script import ClientRecipe, Train, participate
from gossamer.federated.client.store import ClientStore, MemoryStore
from gossamer.federated.client.trainer import Trainer
from gossamer.federated.deployment import limits
from gossamer.federated.deployment.device_directory import DeviceDirectory, new_identity
from gossamer.federated.deployment.invitations import (
    DEVICE,
    JOIN,
    LEAVE,
    RUN,
    UNKNOWN,
    Invitation,
    JoinRequest,
)
from gossamer.federated.deployment.round_report import Line
from gossamer.federated.deployment.server_link import ServerLink
from gossamer.federated.messages import NOT_COUNTED, REPORT, THE_SERVER, Fate, decode, encode
from gossamer.federated.model_state import ModelState
from gossamer.federated.recipe_terms import recipe_terms
from gossamer.federated.script_file import ScriptFile
from gossamer.federated.secure.roster import Identity, IdentityRoster

FAREWELL_SECONDS = 0.7  # for the server to hear that the device leaves, and as long again for what is queued


class Forgotten(GossamerError):
    """The server does not know this device: it was restarted without its journal, or has not met it yet."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """How a device is connected."""

    heartbeat_seconds: float = 15.0  # while nothing else is sent: routers forget silent connections
    silent_seconds: float = 60.0  # of the server, after which a device connects anew
    longest_backoff_seconds: float = 10.0  # between two attempts to connect
    give_up_seconds: float = 3600.0  # without a connection, after which it leaves


class FederationDevice:
    """One device. `run` takes part until the federation has ended."""

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
        say: Line = lambda text: None,
    ) -> None:
        """number: the client that it wants to be; None: the one of its identity in the roster, else the server chooses.
        directory: where it keeps its identity and its state, so that a restarted process is the same device; None: in
        memory. identities: of all devices, with this one's own: then it sends nothing that is not masked, whatever
        recipe the server names. recipe: the only one by which it takes part; None: whatever the server names.

        Raises RecipeError, CheckpointError where the directory is in use or damaged, ConnectError for an unknown
        server.
        """
        options = options or DeviceOptions()
        if number is None and identities is not None and identity is not None:
            number = _enrolled(identities, identity)
        self._script, self._number, self._say = script, number, say
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
                layout=self._state.fingerprint(),
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
        ServerLink(self._endpoint, f"{server[0]}:{server[1]}", say, options.give_up_seconds)

    def run(self) -> int:
        """Take part until the end; returns how many contributions were counted.

        Raises ConnectError or MismatchError where the server refuses this device, PeerLost where it is not there.
        """
        while True:
            invitation = self._join()
            try:
                counted = self._take_part(invitation)
            except Forgotten:
                self._say("the server was started anew; joining again")
                continue
            except ConnectError:  # it takes no part by this recipe or this roster: its number is another's
                self.leave()
                raise
            self.leave()
            return counted

    def leave(self) -> None:
        """Tell the server that nobody is to wait for this device, and close its connection. Takes at most 1.5 s."""
        farewell = Push(to=THE_SERVER, key=LEAVE, stamp=Stamp(0, 0), within_seconds=FAREWELL_SECONDS)
        with suppress(GossamerError):  # it will notice
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
        self._say(f"joined as client {invitation.number} of {invitation.clients}: {invitation.recipe}")
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
        self._say("waiting until enough devices are there and this one is chosen")
        trainer = Trainer(self._model, self._state, terms.strategy, self._script.train)
        script = participate(invitation.number, recipe, self._store(invitation))
        return self._answered(script, trainer)

    def _check_recipe(self, told: Recipe) -> None:
        if self._recipe is not None and repr(told) != repr(self._recipe):
            raise ConnectError(
                f"The server's recipe is {told!r}, and this device takes part by {self._recipe!r} only, so it sends "
                "nothing. Ask who runs the server why they differ, or write a recipe that you agree to: --recipe TEXT"
            )

    def _check_masks(self, invitation: Invitation, masked: bool) -> None:
        if self._identities is None or self._identity is None:
            return
        if not masked:
            raise ConnectError(
                f"The server's recipe {invitation.recipe} has no masks, and this device has a roster, so it sends "
                "nothing without. Start the server with secure=SecureAggregation(), or leave the roster out."
            )
        number, enrolled = invitation.number, _enrolled(self._identities, self._identity)
        if enrolled == number:
            return
        if enrolled is not None:
            raise ConnectError(
                f"The roster holds this device as client {enrolled}, and it joined as client {number}, which the "
                f"others would not trust. Write --number {enrolled}, or leave --number out."
            )
        if number in self._identities.keys:
            raise ConnectError(
                f"The roster holds another device as client {number}, and this one not at all, so the others would not "
                "trust it. Enroll it by a number that is free: gossamer federate enroll --number N --identity FILE"
            )
        line = self._identities.line(number, self._identity.public).strip()
        raise ConnectError(
            f"The roster does not hold this device as client {number}, so the others would not trust it. Add this line "
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
                    self._say(f"round {op.task.round + 1}: trained {answer.work.samples} samples  {shown}".rstrip())
                    continue
                answer = self._endpoint.answer(op)
                if answer.about == UNKNOWN:
                    raise Forgotten("the server does not know this device")
                if isinstance(op, Push) and op.key == REPORT and answer.version == NOT_COUNTED:
                    why = decode(answer.about, Fate, THE_SERVER).refused or "it came too late"
                    self._say(f"round {op.stamp.step + 1}: not counted: {why}")
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


def _enrolled(roster: IdentityRoster, identity: Identity) -> int | None:
    """The number that the roster gives a device."""
    return next((client for client, key in roster.keys.items() if key == identity.public), None)
