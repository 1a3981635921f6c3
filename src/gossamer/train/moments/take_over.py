"""Takeover: finds the rule by which a compressor and an optimizer divide the update, or refuses the pair."""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.strategies import Strategy
from gossamer.base.transport import Transport
from gossamer.comm.elastic.recognition import elastic
from gossamer.errors import AttachError
from gossamer.events import notice
from gossamer.train.engine.bucket import slot_of
from gossamer.train.moments.first_moment import AgreedVariance, MomentumVariance, WindowedMoments
from gossamer.train.moments.frozen_variance import FrozenVariance, RowVariance
from gossamer.train.moments.shared_variance import SharedVariance
from gossamer.train.moments.transfer import MomentumTransfer, SGDMomentumTransfer, SignDescent, WholeStep

RULES: dict[UpdateRule, type[MomentumTransfer]] = {
    UpdateRule.VELOCITY: SGDMomentumTransfer,
    UpdateRule.STEP: WholeStep,
    UpdateRule.FROZEN_VARIANCE: FrozenVariance,
    UpdateRule.ROW_VARIANCE: RowVariance,
    UpdateRule.MOMENTUM_VARIANCE: MomentumVariance,
    UpdateRule.AGREED_VARIANCE: AgreedVariance,
    UpdateRule.SHARED_VARIANCE: SharedVariance,
    UpdateRule.WINDOW: WindowedMoments,
    UpdateRule.SIGN: SignDescent,
}


def ownership(compressor: Compressor, parameters: Mapping[str, Parameter]) -> dict[str, Ownership]:
    """The parameters with momentum that the compressor applies, by name."""
    owners = {name: compressor.owns_momentum(slot_of(name, parameter)) for name, parameter in parameters.items()}
    return {name: owner for name, owner in owners.items() if owner is not None}


def _stays_alone(transport: Transport) -> bool:
    """Whether the group always has one worker. An elastic group of one may grow, so it sends like a larger group."""
    return transport.world == 1 and elastic(transport) is None


def share_second_moment(
    optimizer: Optimizer, strategy: Strategy, parameters: Mapping[str, Parameter], transport: Transport
) -> MomentumTransfer | None:
    """The rule for local steps with an averaged second moment; None if the strategy has none.

    Raises AttachError if the optimizer has no such second moment.
    """
    owner = strategy.ownership
    if owner is None or _stays_alone(transport):
        return None
    if not isinstance(optimizer, owner.optimizers):
        raise AttachError(
            f"{strategy!r} needs the second moment of torch.optim.Adam or AdamW, but this optimizer is a "
            f"{type(optimizer).__name__}. Leave out second_moment, or train with torch.optim.AdamW(model.parameters(), "
            "...)."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = {name: parameter for name, parameter in parameters.items() if id(parameter) in held}
    return RULES[owner.rule](optimizer, own, owner, warns=False)


def take_over(
    optimizer: Optimizer,
    compressor: Compressor,
    parameters: Mapping[str, Parameter],
    transport: Transport,
    clip_norm: float | None,
) -> MomentumTransfer | None:
    """Let the compressor apply the momentum that it owns. None if it owns none, or the world stays one worker.

    Raises AttachError if the optimizer has no such momentum, or settings that are not supported with it.
    """
    owned = {} if _stays_alone(transport) else ownership(compressor, parameters)
    if not owned:
        return None
    owner, *others = set(owned.values())
    if others:
        raise AttachError(
            f"{compressor!r} would take momentum from two kinds of optimizer, but there is one. Keep one of both, such "
            "as DGC(density=0.001)."
        )
    if not isinstance(optimizer, owner.optimizers):
        wanted = owner.optimizers[0].__name__
        known = " or ".join(f"torch.optim.{each.__name__}" for each in owner.optimizers)
        raise AttachError(
            f"{compressor!r} applies the momentum of {known}, but this optimizer is a "
            f"{type(optimizer).__name__}, which would apply momentum a second time. Train with "
            f"torch.optim.{wanted}(model.parameters(), ...), or use TopK(density=0.01), which supports all."
        )
    rule = RULES[owner.rule]
    if clip_norm is not None and rule.arrives_with_momentum:
        raise AttachError(
            f"clip_norm={clip_norm} would clip values that include momentum and were sent already, so the clipped part "
            f"would be lost. Leave clip_norm out and write clip={clip_norm} in {compressor!r}: it scales each tensor's "
            "new gradient separately, before momentum, so that the mean of independent gradients stays within that "
            "norm for any number of workers."
        )
    first = transport.rank == 0  # one notice per job
    own = {name: parameters[name] for name in owned}
    taken = rule(optimizer, own, owner, warns=first)
    for line in taken.notices() if first else ():
        notice(f"{compressor!r}: {line}")
    return taken
