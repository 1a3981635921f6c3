"""Rounds from a strategy: synchronous, masked (secure aggregation), or buffered."""

from __future__ import annotations

from collections.abc import Callable
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
from gossamer.federated.server.synchronous import SynchronousRounds

FOR_BUFFERED = {  # round_seconds: of a task, since buffered rounds have no deadline
    "round_seconds": inf,
    "gather_seconds": inf,
    "fewest": 1,
}
FOR_MASKED = {"phase_seconds": inf}  # in addition to the synchronous options; default: round_seconds
FOR_SYNCHRONOUS = {
    "round_seconds": inf,
    "over_selection": 0.0,
    "fewest": 1,
    "late": "drop",
    "late_versions": 10,
    "gather_seconds": inf,
}


def rounds_for(
    model: GlobalModel,
    *,
    clients: int,
    rounds: int,
    selection: SelectionPolicy | None = None,
    admission: ContributionLimits | None = None,
    config: RoundConfig | None = None,
    on_commit: Callable[[Committed], Any] = lambda committed: None,
    return_seconds: float = 60.0,
    identities: IdentityRoster | None = None,
    **options: Any,
) -> Rounds:
    """Make the rounds for the model's strategy.

    Args:
        model: the global model.
        clients: devices in the federation.
        rounds: versions to make.
        selection: default Uniform.
        admission: limits on contributions.
        config: configuration sent to devices, fixed or as a function of the round's index.
        on_commit: called with each version.
        return_seconds: seconds until a silent device counts as gone after a restart of the server.
        identities: of the devices, required if contributions are masked.
        options: of this kind of rounds. Options of the other kind are accepted with their default value.

    Returns:
        BufferedRounds for an asynchronous strategy, SecureRounds if the strategy masks contributions, else
        SynchronousRounds.

    Raises:
        RecipeError: an option does not apply, or identities are missing.
    """
    is_buffered, is_masked = model.strategy.asynchronous, model.strategy.secure is not None
    local, other = (FOR_BUFFERED, FOR_SYNCHRONOUS) if is_buffered else (FOR_SYNCHRONOUS, FOR_BUFFERED)
    local, other = local | (FOR_MASKED if is_masked else {}), other | FOR_MASKED
    wrong = [name for name, value in options.items() if name not in local and other.get(name, object()) != value]
    if wrong:
        raise RecipeError(
            f"{wrong[0]} means nothing with {model.strategy!r}, since its server "
            f"{'waits for no round' if is_buffered else 'waits for rounds'}. It takes {', '.join(local)}: leave "
            f"{wrong[0]} out."
        )
    own = {name: value for name, value in options.items() if name in local}
    kind: Callable[..., Rounds] = SynchronousRounds
    if is_buffered:
        kind, own["task_seconds"] = BufferedRounds, own.pop("round_seconds", inf)
    if is_masked:
        if identities is None:
            raise RecipeError(
                f"{model.strategy!r} masks contributions, but the server knows no identities of devices. Give it the "
                "roster that all devices read, by serve --roster FILE, or leave secure out."
            )
        kind = partial(SecureRounds, roster=identities)
        own.setdefault("phase_seconds", own.get("round_seconds", inf))
    return kind(
        model,
        clients=clients,
        rounds=rounds,
        selection=selection or Uniform(model.seed),
        admission=admission,
        config=config,
        on_commit=on_commit,
        return_seconds=return_seconds,
        **own,
    )
