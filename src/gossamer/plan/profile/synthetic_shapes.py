"""Synthetic shapes: those of a transformer with a given number of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.aggregation import AggregationContext
from gossamer.comm.simulated import SimulatedGroup
from gossamer.events import Attached
from gossamer.train.session.lifecycle_events import begun
from gossamer.train.synchronizers.stages import bucket_fragments

WIDTH_PER_LAYER = 64


def assumed_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder-only transformer with exactly this many parameters.

    Layers of width d have 12 d^2 + 13 d parameters and take at most three quarters; d = 64 layers, as in common models.
    The rest is an embedding of width d and a bias for the remainder of a row.
    """
    layers = 0
    while _layers_numel(layers + 1, WIDTH_PER_LAYER * (layers + 1)) <= 0.75 * parameters:
        layers += 1
    width = WIDTH_PER_LAYER * max(layers, 1)
    rows, left = divmod(parameters - _layers_numel(layers, width), width)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (rows, width)} if rows else {}
    for layer in range(layers):
        shapes |= {f"layer.{layer}.{name}": shape for name, shape in _layer_shapes(width).items()}
    return shapes | ({"head.bias": (left,)} if left else {})


def _layers_numel(layers: int, width: int) -> int:
    return layers * (12 * width**2 + 13 * width)


def _layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.weight": (3 * width, width),
        "attention.bias": (3 * width,),
        "projection.weight": (width, width),
        "projection.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }


def assumed(parameters: int, recipe: Recipe) -> Attached:
    """The Attached event of a session with a model of the assumed shapes, and AdamW."""
    return attached_to(assumed_shapes(parameters), recipe)


def attached_to(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> Attached:
    """The Attached event of a session with a model of these shapes, in float32, and AdamW."""
    model = {name: Parameter(torch.empty(shape, dtype=torch.float32, device="meta")) for name, shape in shapes.items()}
    fragments = bucket_fragments(recipe.strategy.steady_stage, model, recipe.compressor, AggregationContext())
    alone = SimulatedGroup(1).transports[0]
    return begun(nn.ParameterList(model.values()), AdamW(model.values()), recipe, fragments, alone)
