"""Agreed model: what workers that train apart have in common, for checkpoints and for the end of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from gossamer.train.engine.parameter_views import copy_parameters, state_of
from gossamer.train.session.session import Session


def trains_apart(session: Session) -> bool:
    """Whether workers hold different parameters between rounds."""
    return any(stage.local_parameters for stage in session.recipe.strategy.stages)


def agreed_state(session: Session, state_dict: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `state_dict` gives of the model that the workers agree on. Every rank calls it."""
    if not trains_apart(session):
        return dict(state_dict())
    with session.merged(session.model):
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state_dict().items()}


def close_agreed(session: Session) -> None:
    """End training on every rank, with the agreed state in its model: what is evaluated next is one model."""
    agreed = agreed_state(session, partial(state_of, session.model))
    session.__exit__(None, None, None)
    copy_parameters(agreed, state_of(session.model))
