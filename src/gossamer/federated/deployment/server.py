"""Federation server: one process that holds the model, keeps its journal, and waits for devices to connect."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.base.host_port import Address
from gossamer.base.peer_ops import without_stops
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.runtime.peer_thread import PeerThread
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import RecipeError
from gossamer.events import notice
from gossamer.federated.client.functions import ScriptFile
from gossamer.federated.deployment import limits
from gossamer.federated.deployment.files import FederationIdentity, FolderLock, same_federation
from gossamer.federated.deployment.reception import DEVICE, RUN, Enrollment, Invitation, Patience, Reception
from gossamer.federated.deployment.report import Gathering, Line, RoundReport
from gossamer.federated.evaluation import Evaluation, Evaluator, Metrics, StopCondition
from gossamer.federated.federation import recipe_terms
from gossamer.federated.messages import PART_BYTES, THE_SERVER
from gossamer.federated.model_state import ModelState
from gossamer.federated.round_record import RoundRecord
from gossamer.federated.secure_aggregation.identities import IdentityRoster
from gossamer.federated.server.from_strategy import RoundPlan, rounds_for
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.journal import keep
from gossamer.federated.server.rounds import Committed, Rounds

HEARTBEAT_SECONDS = 15.0  # home routers may drop a connection after 30 s of silence
SILENT_SECONDS = 300.0
GOODBYE_SECONDS = 2.0
EVALUATION_SECONDS = 60.0  # waited for at the end
Ended = Literal["finished", "reached", "exhausted", "stopped"]


@dataclass(frozen=True, kw_only=True)
class FederationSettings(RoundPlan):
    """Settings of a federation and its server.

    Attributes:
        recipe: the federated recipe.
        seed: of the federation.
        until: a condition on a metric, such as "accuracy>0.95". No round begins after it is met.
        silent_seconds: seconds without a message until a connection is closed.
        patience: seconds to wait for absent devices.
        part_bytes: size of the parts of an upload.
    """

    recipe: str
    seed: int = 0
    until: str | None = None
    round_seconds: float = 600.0
    gather_seconds: float = 600.0
    silent_seconds: float = SILENT_SECONDS
    patience: Patience = field(default_factory=Patience)
    part_bytes: int = PART_BYTES

    def endpoint(self, address: Address, tls: Tls | None) -> EndpointOptions:
        return EndpointOptions(
            address=address[0],
            port=address[1],
            tls=tls,
            dead_after_seconds=self.silent_seconds,
            heartbeat_seconds=min(HEARTBEAT_SECONDS, self.silent_seconds / 3),
            gone_when_closed=True,
            goodbye_seconds=GOODBYE_SECONDS,
            most_asks=limits.MOST_ASKS,
            most_handshakes=limits.MOST_HANDSHAKES,
            handshake_seconds=limits.HANDSHAKE_SECONDS,
        )


class FederationServer:
    """The server of a federation. It listens once it is constructed; `run` serves until all rounds are made.

    Args:
        script: the user's functions.
        settings: of the federation.
        token: 32 secret bytes.
        address: to listen on.
        tls: encryption of connections.
        journal: folder of the journal, from which the server continues if it is not empty.
        identities: of all devices, if the recipe masks contributions.
        `print_text`: prints a progress line.

    Raises:
        RecipeError, CheckpointError, ConnectError: before any device can connect.
        ValueError: a setting is invalid.
    """

    def __init__(
        self,
        script: ScriptFile,
        settings: FederationSettings,
        *,
        token: bytes,
        address: Address = ("127.0.0.1", 0),
        tls: Tls | None = None,
        journal: Path | None = None,
        identities: IdentityRoster | None = None,
        print_text: Line = lambda text: None,
    ) -> None:
        self.settings, self._script, self._stopped, self._reached = settings, script, False, False
        self._until = None if settings.until is None else StopCondition.read(settings.until)
        terms = recipe_terms(settings.recipe)
        self._recipe = repr(terms.recipe)
        limits.check_blocks(terms.strategy)
        _check_budget(terms.strategy, journal)
        model = script.model()
        state = ModelState.of(model)
        identity = FederationIdentity(
            federation=secrets.token_hex(8),
            recipe=self._recipe,
            clients=settings.clients,
            seed=settings.seed,
            layout=state.fingerprint,
        )
        with ExitStack() as opening:
            if journal is not None:
                lock = FolderLock(journal, "Two servers would overwrite each other's versions: name another --journal")
                opening.callback(lock.close)
                identity = same_federation(journal, identity)
            parameters = state.read(model).flat
            self.rounds = self._rounds(
                GlobalModel(terms.strategy, terms.compressor, terms.pull, state, parameters, settings.seed), identities
            )
            self.rounds.on_made = self._made
            self.resumed = journal is not None and keep(journal, self.rounds)
            accountant = self.rounds.accountant
            self.report = RoundReport(
                settings.rounds,
                print_text,
                None if journal is None else journal / "rounds.jsonl",
                names_clients=accountant is None
                or not accountant.amplified,  # the drawn devices may have to stay secret
                made=self.rounds.model.version,
            )
            self._end_if_reached(self.report.rounds)
            self._gathering = Gathering(self.rounds, print_text, settings.gather_seconds)
            enrollment = Enrollment(settings.clients, None if journal is None else journal / "enrollment.json")
            self.reception = Reception(self.rounds, enrollment, _invitation(settings, identity), settings.patience)
            _allow_open_files(settings.clients)
            self._endpoint = TcpEndpoint(_credentials(settings, state, token), settings.endpoint(address, tls))
            self._evaluation = Evaluation(_evaluator(script, model, state, settings))
            self._open = opening.pop_all()

    @property
    def address(self) -> Address:
        """The address that it listens on."""
        return self._endpoint.address

    @property
    def ended(self) -> Ended:
        """How the federation ended; "stopped" if it has not ended."""
        if self._reached:
            return "reached"
        if not self.rounds.finished:
            return "stopped"
        return "finished" if self.rounds.model.version >= self.settings.rounds else "exhausted"

    @property
    def why(self) -> str:
        """Reason of an early end; else empty."""
        if self._reached:
            return f"{self._until} is reached"
        return self.rounds.why_exhausted if self.ended == "exhausted" else ""

    def model(self) -> nn.Module:
        """The script's model with the parameters of the last version. Call it after `run` has returned."""
        made = self._script.model()
        self.rounds.model.state.write(self.rounds.model.parameters, made)
        return made

    def record(self, path: Path) -> None:
        """Write all rounds so far as JSON. Raises CheckpointError if the file cannot be written."""
        settings = self.settings
        self.report.record(
            path,
            recipe=self._recipe,
            clients=settings.clients,
            seed=settings.seed,
            ended=self.ended,
            why=self.why,
        )

    def start(self) -> PeerThread:
        """Serve in a thread."""
        return self._endpoint.start(without_stops(self.reception.serve(lambda: self._stopped)))

    def stop(self) -> None:
        """End `run` before the next event. Safe to call in a signal handler."""
        self._stopped = True

    def run(self, poll: Callable[[], None] = lambda: None) -> Ended:
        """Serve until the federation has ended and devices know it, or until `stop`. Exceptions of the serving thread
        are raised here.

        Args:
            poll: called twice a second in this thread.
        """
        serving = self.start()
        try:
            while True:
                try:
                    serving.wait(0.5)
                    break
                except TimeoutError:
                    self._gathering.look()
                    poll()
        finally:
            self.close()
        if self._until is not None and not self._reached:
            self._until.notice_if_missing([each.all_metrics for each in self.report.rounds])
        return self.ended

    def close(self) -> None:
        """Disconnect all devices, which will try to reconnect, and finish pending evaluations."""
        self._endpoint.close()
        self._evaluation.close(0.0 if self._stopped else EVALUATION_SECONDS)
        self._open.close()

    def traffic(self) -> tuple[int, int]:
        """Bytes of frames received from devices and sent to them so far."""
        each = [traffic for peer, traffic in self._endpoint.statistics().items() if peer.kind == DEVICE]
        up = sum(one.payload_bytes_received + one.overhead_bytes_received for one in each)
        down = sum(one.payload_bytes_sent + one.overhead_bytes_sent for one in each)
        return up, down

    def _rounds(self, model: GlobalModel, identities: IdentityRoster | None) -> Rounds:
        return rounds_for(
            model,
            self.settings,
            on_commit=self._committed,
            return_seconds=self.settings.patience.absent_seconds,
            identities=identities,
        )

    def _made(self, committed: Committed) -> None:
        """Store the record of a version before the journal has it, so that every journaled version has a record."""
        self._record = self.report.round_made(committed, len(self.reception.joined), self.traffic())
        try:
            self.report.keep(self._record)
        except OSError as error:
            notice(f"The record of version {committed.version} cannot be kept, and the rounds continue: {error!r}")

    def _committed(self, committed: Committed) -> None:
        write = partial(self._write, self._record)
        self._evaluation.submit(committed.version, self.rounds.model.parameters, write)

    def _write(self, record: RoundRecord, metrics: Metrics | None) -> None:
        record = replace(record, metrics=dict(metrics or {}))
        self._end_if_reached([record])
        self.report.write(record)

    def _end_if_reached(self, records: Sequence[RoundRecord]) -> None:
        """If the stop condition is met, make the current version the last one."""
        if self._until is not None and any(self._until.reached(each.all_metrics) for each in records):
            self.rounds.rounds, self._reached = self.rounds.model.version, True


def _evaluator(
    script: ScriptFile, model: nn.Module, state: ModelState, settings: FederationSettings
) -> Evaluator | None:
    if script.evaluate is None:
        return None
    return Evaluator(script.evaluate, model, state, seed=settings.seed, config=settings.config)


def _check_budget(strategy: FederatedStrategy, journal: Path | None) -> None:
    if strategy.privacy is not None and strategy.privacy.budget is not None and journal is None:
        raise RecipeError(
            f"{strategy.privacy!r} has a budget, but a server without a journal does not remember how much is spent, "
            "and a restart would spend it again. Name a folder that stays: --journal DIRECTORY"
        )


def _invitation(settings: FederationSettings, identity: FederationIdentity) -> Invitation:
    return Invitation(
        federation=identity.federation,
        recipe=identity.recipe,
        clients=settings.clients,
        rounds=settings.rounds,
        seed=settings.seed,
        part_bytes=settings.part_bytes,
    )


def _credentials(settings: FederationSettings, state: ModelState, token: bytes) -> Credentials:
    return Credentials(
        me=THE_SERVER,
        token=token,
        run=RUN,
        layout=state.fingerprint,
        largest_frame_bytes=limits.largest_frame_bytes(state),
        accepted_frame_bytes=limits.accepted_frame_bytes(state, settings.part_bytes),
    )


def _allow_open_files(devices: int) -> None:
    room = limits.allow_open_files(devices)
    if room < devices:
        notice(
            f"This system lets one process open files for {room} devices at once, but this federation has {devices}. "
            "Further devices wait until others leave; raise the limit: ulimit -n "
            f"{limits.FILES_PER_DEVICE * devices + limits.OTHER_FILES}"
        )
