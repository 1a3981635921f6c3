"""Rounds from a strategy: synchronous, masked (secure aggregation), or buffered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from typing import Any

from gossamer.errors import RecipeError
from gossamer.federated.federation import RoundConfig
from gossamer.federated.secure_aggregation.identities import IdentityRoster
from gossamer.federated.secure_aggregation.rounds import SecureRounds
from gossamer.federated.server.admission import ContributionLimits
from gossamer.federated.server.buffered import BufferedRounds
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.rounds import Committed, Rounds
from gossamer.federated.server.selection import SelectionPolicy, Uniform
from gossamer.federated.server.synchronous import Late, SynchronousRounds

FOR_BUFFERED = ("round_seconds", "gather_seconds", "fewest")
FOR_SYNCHRONOUS = (*FOR_BUFFERED, "over_selection", "late", "late_versions")
FOR_MASKED = ("phase_seconds",)  # in addition to those of synchronous rounds


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """How the rounds of a federation are made.

    Attributes:
        clients: devices in the whole federation. A strategy's `fraction` is relative to it.
        rounds: versions to make.
        selection: policy that samples clients; None: uniform.
        admission: limits on contributions; None: the usual ones.
        config: configuration sent to devices in each round, or a function from a round's index to it.
        round_seconds: deadline of a round, after which it ends with the present reports; with FedBuff, whose rounds
            have no deadline, of a device's task.
        gather_seconds: seconds until a round begins with the present devices.
        over_selection: fraction of additional devices beyond the cohort.
        fewest: smallest number of devices to begin a round with, and of reports at its deadline.
        late: "drop" discards reports after their round; "count" adds them to the next version.
        late_versions: versions until such a report is discarded.
        phase_seconds: deadline of each exchange of a masked round; None: round_seconds.
    """

    clients: int
    rounds: int
    selection: SelectionPolicy | None = None
    admission: ContributionLimits | None = None
    config: RoundConfig | None = None
    round_seconds: float = inf
    gather_seconds: float = inf
    over_selection: float = 0.0
    fewest: int = 1
    late: Late = "drop"
    late_versions: int = 10
    phase_seconds: float | None = None


def rounds_for(
    model: GlobalModel,
    settings: RoundPlan,
    *,
    on_commit: Callable[[Committed], Any] = lambda committed: None,
    return_seconds: float = 60.0,
    identities: IdentityRoster | None = None,
) -> Rounds:
    """Make the rounds for the model's strategy.

    Args:
        model: the global model.
        settings: of the rounds.
        on_commit: called with each version.
        return_seconds: seconds until a silent device counts as gone after a restart of the server.
        identities: of the devices, required if contributions are masked.

    Returns:
        BufferedRounds for an asynchronous strategy, SecureRounds if the strategy masks contributions, else
        SynchronousRounds.

    Raises:
        RecipeError: a setting does not apply to this kind of rounds, or identities are missing.
    """
    is_buffered, is_masked = model.strategy.asynchronous, model.strategy.secure is not None
    used = FOR_BUFFERED if is_buffered else FOR_SYNCHRONOUS + FOR_MASKED * is_masked
    for item in fields(RoundPlan):
        unused = item.name in FOR_SYNCHRONOUS + FOR_MASKED and item.name not in used
        if unused and getattr(settings, item.name) != item.default:
            raise RecipeError(
                f"{item.name} means nothing with {model.strategy!r}, since its server "
                f"{'waits for no round' if is_buffered else 'waits for rounds'}. It takes {', '.join(used)}: leave "
                f"{item.name} out."
            )
    own = {name: getattr(settings, name) for name in used}
    kind: Callable[..., Rounds] = SynchronousRounds
    if is_buffered:
        kind, own["task_seconds"] = BufferedRounds, own.pop("round_seconds")
    if is_masked:
        if identities is None:
            raise RecipeError(
                f"{model.strategy!r} masks contributions, but the server knows no identities of devices. Give it the "
                "roster that all devices read, by serve --roster FILE, or leave secure out."
            )
        kind = partial(SecureRounds, roster=identities)
        own["phase_seconds"] = settings.round_seconds if settings.phase_seconds is None else settings.phase_seconds
    return kind(
        model,
        clients=settings.clients,
        rounds=settings.rounds,
        selection=settings.selection or Uniform(model.seed),
        admission=settings.admission,
        config=settings.config,
        on_commit=on_commit,
        return_seconds=return_seconds,
        **own,
    )
