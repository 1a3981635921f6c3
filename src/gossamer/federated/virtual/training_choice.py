"""Training choice: how a simulation trains devices: many in a call where their function and the model allow it."""

from __future__ import annotations

from torch import nn

from gossamer.algorithms.strategies.federated import FederatedStrategy
from gossamer.federated.client.functions import STEPS, ClientFunction
from gossamer.federated.model_state import ModelState
from gossamer.federated.virtual.training import DeviceTraining, OneByOne
from gossamer.federated.virtual.vectorized_training import ManyAtOnce, why_not_vectorized


def training_of(
    function: ClientFunction, model: nn.Module, state: ModelState, strategy: FederatedStrategy
) -> DeviceTraining:
    steps = getattr(function, STEPS, None)
    if steps is None:
        return OneByOne(model, state, strategy, function)
    why = why_not_vectorized(model, state)
    return OneByOne(model, state, strategy, function, why) if why else ManyAtOnce(model, state, strategy, steps)
