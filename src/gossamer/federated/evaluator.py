"""Evaluator: the user's evaluation function, called alike wherever versions are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.base import rng
from gossamer.errors import LoopError
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.model_state import ModelState
from gossamer.federated.round_config import RoundConfig, config_by_round


class Evaluator:
    """Tells the metrics of versions."""

    def __init__(
        self,
        function: ClientFunction,
        model: nn.Module,
        state: ModelState,
        *,
        seed: int = 0,
        config: RoundConfig | None = None,
    ) -> None:
        """model: is overwritten. config: as devices are told it."""
        self._function, self._model, self._state = function, model, state
        self._seed, self._config = seed, config_by_round(config)

    def metrics(self, version: int, parameters: Tensor) -> dict[str, float]:
        """Of a version, by its parameters: (n,). Its Round has the index of the round that made it, from 0. No
        gradients are computed, unless the function asks for them by torch.enable_grad().

        Raises LoopError for what is no Update, and what the function raises.
        """
        self._state.write(parameters, self._model)
        self._model.eval()
        index = version - 1
        seed = rng.address(self._seed, "evaluate", version) >> 11
        with torch.no_grad():
            told = Round(index=index, client=None, config=self._config(index), seed=seed)
            update = self._function(self._model, told)
        if not isinstance(update, Update):
            raise LoopError(
                f"The evaluation returned {update!r}, and its metrics go into the record. End it with `return "
                'gossamer.federated.Update(samples=len(data), metrics={"accuracy": accuracy})`.'
            )
        return {name: float(value) for name, value in update.metrics.items()}
