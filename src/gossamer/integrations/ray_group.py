"""Ray group: starts a group of Ray workers as a Gossamer run; measures their steps between reports."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gossamer import events
from gossamer.base.host_port import LOOPBACK
from gossamer.comm.environment.rendezvous import leave_meeting
from gossamer.comm.environment.run_token import TOKEN_BYTES, make_token
from gossamer.events import Event, StepEnded
from gossamer.world import init

PREFIX = "gossamer/"


class SessionNumbers:
    """Measures the steps of this process's session."""

    def __init__(self) -> None:
        self._forget()

    def watch(self) -> Callable[[], None]:
        """Subscribe to steps. Returns the function that unsubscribes."""
        return events.subscribe(self, shows_notices=False)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            self._steps += 1
            self._skipped += event.skipped
            self._seconds += event.seconds
            self._waiting_seconds += event.waiting_seconds
            self._bytes_sent += event.bytes_sent

    def take(self) -> dict[str, float]:
        """Metrics of the steps since the last call; empty without steps.

        gossamer/steps and gossamer/skipped are counts, the others means per step: gossamer/step_seconds is a step's
        time, gossamer/waiting_seconds the part in which the training thread waited for other workers, and
        gossamer/bytes_per_step this worker's payload.
        """
        if not (steps := self._steps):
            return {}
        metrics = {
            "steps": steps,
            "skipped": self._skipped,
            "step_seconds": self._seconds / steps,
            "waiting_seconds": self._waiting_seconds / steps,
            "bytes_per_step": self._bytes_sent / steps,
        }
        self._forget()
        return {f"{PREFIX}{name}": value for name, value in metrics.items()}

    def _forget(self) -> None:
        self._steps = self._skipped = 0
        self._seconds = self._waiting_seconds = self._bytes_sent = 0.0


TOKEN_FILE = "GOSSAMER_TOKEN_FILE"
_secrets: tempfile.TemporaryDirectory[str] | None = None  # of this worker; removed at exit, too


class WorkerGroup(Protocol):
    """The methods of Ray's worker group that Gossamer uses. Results are ordered by rank."""

    def execute(self, function: Callable[..., Any], *arguments: Any) -> list[Any]: ...
    def execute_single(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any: ...


class WorkerPlace(Protocol):
    """Rank and local rank of a worker, from its ray.train.get_context()."""

    def get_world_rank(self) -> int: ...
    def get_world_size(self) -> int: ...
    def get_local_rank(self) -> int: ...
    def get_local_world_size(self) -> int: ...
    def get_node_rank(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings that all workers of one start of a group share. The token is never printed."""

    address: str  # a free port on rank 0's machine
    port: int
    timeout_seconds: float
    tls: str | None = None
    interface: str | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), repr=False)

    def variables(self, place: WorkerPlace) -> dict[str, str]:
        """Environment variables of one worker. Workers of a single machine use its loopback address."""
        alone = place.get_local_world_size() == place.get_world_size()
        chosen = {"GOSSAMER_TLS": self.tls, "GLOO_SOCKET_IFNAME": self.interface}
        return {
            "RANK": str(place.get_world_rank()),
            "WORLD_SIZE": str(place.get_world_size()),
            "LOCAL_RANK": str(place.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(place.get_local_world_size()),
            "NODE_RANK": str(place.get_node_rank()),
            "MASTER_ADDR": LOOPBACK if alone else self.address,
            "MASTER_PORT": str(self.port),
            "GOSSAMER_RUN": self.run,
            "GOSSAMER_TIMEOUT": f"{self.timeout_seconds:g}",
            **{name: value for name, value in chosen.items() if value},
        }


def start_group(
    group: WorkerGroup,
    free_endpoint: Callable[[], tuple[str, int]],
    place: Callable[[], WorkerPlace],
    **options: Any,
) -> None:
    """Connect the workers of a group that has just been started.

    Each start has a new name and token, so workers of an earlier start are rejected.

    Args:
        group: Runs functions in the workers.
        free_endpoint: Called on rank 0. Returns its machine's address and a free port.
        place: Called on each worker. Returns its place.
        options: Of GroupSettings.
    """
    address, port = group.execute_single(0, free_endpoint)
    group.execute(enter_group, GroupSettings(address=address, port=port, **options), place)
    group.execute(_join)  # after all have the address


def enter_group(settings: GroupSettings, place: Callable[[], WorkerPlace]) -> None:
    """Called on each worker: export the settings. The token is stored in a file that only this user can read."""
    global _secrets
    leave_group()
    os.environ.update(settings.variables(place()))
    _secrets = tempfile.TemporaryDirectory(prefix="gossamer-")
    os.environ[TOKEN_FILE] = str(make_token(Path(_secrets.name) / "token", settings.token))


def _join() -> None:
    init()  # nothing is returned: Ray would pickle it, and a World stays in its process


def leave_group() -> None:
    """Called on each worker after training: disconnect and delete the token."""
    global _secrets
    if _secrets is not None:
        leave_meeting()
        _secrets.cleanup()
        _secrets = None
