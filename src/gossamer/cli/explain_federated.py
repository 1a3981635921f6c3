"""Explanation of federated recipes: bytes per round, and state of the devices and the server."""

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
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.base.layout import Layout
from gossamer.errors import RecipeError
from gossamer.federated.client.functions import load_script
from gossamer.federated.model_state import ModelState
from gossamer.federated.round_forecast import RoundForecast, forecast_round
from gossamer.plan.profile.synthetic_shapes import assumed_shapes

RECIPE = "GOSSAMER_RECIPE"  # overrides the recipe of a script
NO_STEP_TIME = (
    "a federation has no step time to estimate: devices compute and send at their own speeds. Leave out --network, "
    "--step-seconds, --speeds and --own-machines; `gossamer federate` reports the virtual seconds of a whole training."
)


def explain_federated(
    recipe: Recipe, script: Path | None, arguments: Sequence[str], parameters: int, clients: int
) -> tuple[list[str], dict[str, Any]]:
    """Explain one round of a federated recipe. The script of `gossamer federate` makes its model; nothing is trained.

    Args:
        recipe: with a federated strategy.
        script: script of `gossamer federate`; None for assumed shapes.
        arguments: of the script.
        parameters: size of the assumed model without a script.
        clients: number of devices in the federation.

    Returns:
        Lines to print, and a record of them.

    Raises:
        GossamerError: the recipe cannot be priced, or the script does not define a model.
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
        raise RecipeError(f"the cost of this recipe cannot be computed without {error.name}: {error}") from error
    return list(_lines(recipe, strategy, model, found)), _record(recipe, model, found)


def _model(recipe: Recipe, script: Path, arguments: Sequence[str]) -> nn.Module:
    """Model of the script. A script that attaches a session raises at attach, before it trains."""
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
    yield "Bytes sent per round:"
    yield f"  {'':<28}{'a device':>20}{'the server':>20}"
    yield f"  {'up':<28}{found.up_bytes:>20,}{found.server_up_bytes:>20,}{_masks(found)}"
    yield f"  {'down':<28}{found.down_bytes:>20,.0f}{found.server_down_bytes:>20,.0f}{_pulled(found)}"
    both = found.up_bytes + found.down_bytes
    share = f"   {both / found.dense_bytes:.2%} of FedAvg() without compression"
    yield f"  {'both':<28}{both:>20,.0f}{found.cohort * both:>20,.0f}{share}"
    yield f"and {found.whole_bytes:,} down to a device that has no version yet."
    yield ""
    yield "State between rounds, in bytes:"
    yield f"  {'a device':<28}{found.device_bytes:>20,}   including residuals {found.residual_bytes:,}"
    yield f"  {'the server, in a round':<28}{found.server_bytes:>20,}{_kept(strategy)}"
    if found.epsilon and strategy.privacy is not None:
        yield ""
        yield f"Privacy budget: epsilon for delta {strategy.privacy.delta:g}:"
        for rounds, epsilon in found.epsilon:
            yield f"  {f'after {rounds:,} rounds':<28}{epsilon:>20.3f}"


def _round(strategy: FederatedStrategy, found: RoundForecast) -> str:
    if strategy.asynchronous:
        training = strategy.cohort(found.clients)
        return f"{training:,} devices train concurrently; every {found.cohort:,} contributions make a version"
    return f"{found.cohort:,} of {found.clients:,} devices train, and their contributions make a version"


def _training(strategy: FederatedStrategy) -> str:
    if strategy.epochs is None:
        return f"{strategy.local_steps:,} steps per round, in your script's loop"
    return f"{strategy.epochs:,} pass{'es' * (strategy.epochs > 1)} over the device's data per round, by your loop"


def _masks(found: RoundForecast) -> str:
    return "   masked; keys and shares are additional" if found.masks else ""


def _pulled(found: RoundForecast) -> str:
    if found.link_bytes is None:
        return "   the whole parameters; pull=Int8() sends differences"
    return f"   {found.link_bytes:,} for each version since its last, on average"


def _kept(strategy: FederatedStrategy) -> str:
    return "" if strategy.aggregator.is_linear else f"   including all contributions, for {strategy.aggregator!r}"


def _record(recipe: Recipe, model: str, found: RoundForecast) -> dict[str, Any]:
    facts = asdict(found) | {
        "server_up_bytes": found.server_up_bytes,
        "server_down_bytes": found.server_down_bytes,
        "epsilon": dict(found.epsilon),
    }
    return {"recipe": repr(recipe), "model": model, "round": facts}
