"""Checkpoint state: the protocol of stateful parts, states of random generators, and checks of a tree's form."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.strategies import AGREED, FROM
from gossamer.errors import CheckpointError


class Stateful(Protocol):
    """A part of a checkpoint: model, optimizer, scaler, world."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def random_state() -> dict[str, Any]:
    """The state of torch's, Python's and NumPy's global generators."""
    kind, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
        "python": [kind, list(numbers), gauss],
        "numpy": _numpy_state(),
    }


def _numpy_state() -> list[Any] | None:
    """State of NumPy's global generator; None if it was replaced by another bit generator."""
    kind, numbers, *rest = np.random.get_state()
    return [kind, torch.from_numpy(np.asarray(numbers, dtype=np.int64)), *rest] if kind == "MT19937" else None


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators; those of GPUs as far as this machine has them."""
    torch.set_rng_state(state["torch"])
    for number, numbers in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(numbers, number)
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))
    if state.get("numpy"):  # earlier versions did not save it
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer in the dtypes of the saved state. torch casts all but "step" to the parameter's dtype, such
    as NAdam's float32 product of a float64 parameter, so that the next step would have other bits."""
    optimizer.load_state_dict(dict(state))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in enumerate(parameters):
        saved, loaded = state.get("state", {}).get(place), optimizer.state.get(parameter)
        if not isinstance(saved, dict) or not isinstance(loaded, dict):
            continue
        for key, value in saved.items():
            cast = loaded.get(key)
            if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
                loaded[key] = value.to(cast.device)


class OptimizerState:
    """An optimizer as a part of a checkpoint."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        load_optimizer(self._optimizer, state_dict)


MERGING_PREFIX = "merging."  # of the keys of a strategy's state, next to the compressor's
AGREED_KEY = MERGING_PREFIX + AGREED
FROM_KEY = MERGING_PREFIX + FROM


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer, in its order."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    return [[known.get(id(p), f"unnamed.{at}.{place}") for place, p in enumerate(g)] for at, g in enumerate(groups)]


SESSION_FORM = {
    "rank": int,
    "world": int,
    "recipe": str,
    "layout": str,
    "step": int,
    "passes": int,
    "state": dict,
    "progress": dict,
}
TREE_FORM = {"session": SESSION_FORM, "model": dict, "optimizer": dict, "world": dict, "random": dict, "mine": dict}


def refuse_other_state(state: Any) -> None:
    """Raise CheckpointError unless `state` has the form of Session.state_dict()."""
    problem = _misfit(state, SESSION_FORM, "the state")
    if problem:
        raise CheckpointError(
            f"session.load_state_dict needs a result of session.state_dict(): {problem}. Write "
            "session.load_state_dict(state); for a checkpoint of session.save write session.load(directory)."
        )


def refuse_other_tree(tree: Any, where: str) -> None:
    """Raise CheckpointError unless `tree` has the form of a session's checkpoint."""
    problem = _misfit(tree, TREE_FORM, "the tree")
    if problem:
        raise CheckpointError(
            f"{where} is not a checkpoint of a session: {problem}. Another program wrote it; remove it, and load an "
            "earlier step."
        )


def _misfit(value: Any, form: Any, name: str) -> str:
    """The first difference between a tree and `form`, {key: form} or a type; "" without one."""
    if isinstance(form, type):
        return "" if isinstance(value, form) else f"{name} is a {type(value).__name__}, not a {form.__name__}"
    if not isinstance(value, dict):
        return f"{name} is a {type(value).__name__}, not a dict"
    missing = [key for key in form if key not in value]
    if missing:
        return f"{name} has no {missing[0]!r}"
    return next(filter(None, (_misfit(value[key], inner, f"{name}.{key}") for key, inner in form.items())), "")
