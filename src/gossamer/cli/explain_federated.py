"""Explanation of federated recipes: what a round sends, and what devices and the server remember."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies.federated import FederatedStrategy
from gossamer.base.layout import Layout
from gossamer.errors import RecipeError
from gossamer.federated.client.functions import load_script
from gossamer.federated.model_state import ModelState
from gossamer.federated.round_forecast import RoundForecast, forecast_round
from gossamer.plan.profile.synthetic_shapes import assumed_shapes

RECIPE = "GOSSAMER_RECIPE"  # what a session takes in place of a script's own
NO_STEP_TIME = (
    "a federation has no step whose time could be foretold: devices compute and send at their own speeds. Leave "
    "--network, --step-seconds and --own-machines out; `gossamer federate` tells virtual seconds of a whole training."
)


def explain_federated(
    recipe: Recipe, script: Path | None, arguments: Sequence[str], parameters: int, clients: int
) -> tuple[list[str], dict[str, Any]]:
    """Lines to print and a record of them. SCRIPT is one of `gossamer federate`: its model is made, nothing is trained.

    Raises GossamerError.
    """
    strategy = recipe.strategy
    assert isinstance(strategy, FederatedStrategy)
    if script is None:
        layout, dtype, model = Layout.of(assumed_shapes(parameters)), torch.float32, "shapes assumed, a transformer's"
    else:
        state = ModelState.of(_model(recipe, script, arguments))
        layout, dtype, model = state.layout, state.dtype, str(script)
    try:
        found = forecast_round(recipe, layout, dtype, clients)
    except ImportError as error:
        raise RecipeError(f"what this recipe costs cannot be told without {error.name}: {error}") from error
    return list(_lines(recipe, strategy, model, found)), _record(recipe, model, found)


def _model(recipe: Recipe, script: Path, arguments: Sequence[str]) -> nn.Module:
    """A script that attaches a session instead is refused there, before it trains."""
    before = os.environ.get(RECIPE)
    os.environ[RECIPE] = repr(recipe)
    try:
        with redirect_stdout(sys.stderr):
            return load_script(script, arguments).model()
    finally:
        if before is None:
            del os.environ[RECIPE]
        else:
            os.environ[RECIPE] = before


def _lines(recipe: Recipe, strategy: FederatedStrategy, model: str, found: RoundForecast) -> Iterator[str]:
    yield f"recipe      {recipe!r}"
    yield f"clients     {found.clients:,}"
    yield f"parameters  {found.parameters:,} in {found.tensors:,} tensors ({model})"
    yield f"round       {_round(strategy, found)}"
    yield f"training    {_training(strategy)}"
    yield ""
    yield "A round sends, in bytes:"
    yield f"  {'':<28}{'a device':>20}{'the server':>20}"
    yield f"  {'up':<28}{found.up_bytes:>20,}{found.server_up_bytes:>20,}{_masks(found)}"
    yield f"  {'down':<28}{found.down_bytes:>20,.0f}{found.server_down_bytes:>20,.0f}{_pulled(found)}"
    both = found.up_bytes + found.down_bytes
    share = f"   {both / found.dense_bytes:.2%} of FedAvg() without compression"
    yield f"  {'both':<28}{both:>20,.0f}{found.cohort * both:>20,.0f}{share}"
    yield f"and {found.whole_bytes:,} down to a device that holds no version yet."
    yield ""
    yield "Between rounds they remember, in bytes:"
    yield f"  {'a device':<28}{found.device_bytes:>20,}   of these residuals {found.residual_bytes:,}"
    yield f"  {'the server, in a round':<28}{found.server_bytes:>20,}{_kept(strategy)}"
    if found.epsilon and strategy.privacy is not None:
        yield ""
        yield f"Privacy: epsilon, for delta {strategy.privacy.delta:g}, that it will cost:"
        for rounds, epsilon in found.epsilon:
            yield f"  {f'after {rounds:,} rounds':<28}{epsilon:>20.3f}"


def _round(strategy: FederatedStrategy, found: RoundForecast) -> str:
    if strategy.asynchronous:
        training = strategy.cohort(found.clients)
        return f"{training:,} devices train at any time, and every {found.cohort:,} contributions make a version"
    return f"{found.cohort:,} of {found.clients:,} devices train, and a version is made of what they report"


def _training(strategy: FederatedStrategy) -> str:
    if strategy.epochs is None:
        return f"{strategy.local_steps:,} steps a round, of the loop in your script"
    return f"{strategy.epochs:,} pass{'es' * (strategy.epochs > 1)} over the device's data a round, by your own loop"


def _masks(found: RoundForecast) -> str:
    return "   under masks; keys and shares come beside" if found.masks else ""


def _pulled(found: RoundForecast) -> str:
    if found.link_bytes is None:
        return "   the parameters as they are; pull=Int8() sends differences"
    return f"   {found.link_bytes:,} for each version since its last, on average"


def _kept(strategy: FederatedStrategy) -> str:
    return "" if strategy.aggregator.is_linear else f"   with all contributions, for {strategy.aggregator!r}"


def _record(recipe: Recipe, model: str, found: RoundForecast) -> dict[str, Any]:
    told = asdict(found) | {
        "server_up_bytes": found.server_up_bytes,
        "server_down_bytes": found.server_down_bytes,
        "epsilon": dict(found.epsilon),
    }
    return {"recipe": repr(recipe), "model": model, "round": told}
