"""Model shapes: a model's tensors, and the times in the backward pass at which their gradients are ready."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import bounded_file
from gossamer.base.json_text import read_json
from gossamer.base.units import shown
from gossamer.errors import GossamerError
from gossamer.plan.profile.user_script import attached_by
from gossamer.plan.rehearse.model_zoo import BUILT_IN, Layer

EXAMPLE = '[["first.weight", [64, 3, 7, 7], 1.0], ["last.weight", [1000, 512], 0.1]]'


MOST_ELEMENTS = 2**48
SHOWN_CHARACTERS = 200  # of an invalid entry


class ShapesError(GossamerError, ValueError):
    """Invalid shapes."""


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    share: float  # fraction of the backward pass after which it is ready, in [0, 1]

    def __post_init__(self) -> None:
        if not self.name:
            raise ShapesError("a tensor needs a name, since state between steps is stored by name")
        if not all(type(size) is int and size > 0 for size in self.shape):
            raise ShapesError(
                f'"{self.name}": a shape must be a list of positive whole numbers, got {list(self.shape)}'
            )
        if self.numel > MOST_ELEMENTS:
            raise ShapesError(f'"{self.name}" has more elements than any memory: write the shape of one tensor')
        if not (isfinite(self.share) and 0 <= self.share <= 1):
            raise ShapesError(
                f'"{self.name}": a share is the fraction of the backward pass after which the gradient is ready, in '
                f"[0, 1], got {self.share}. The last layer's is the smallest, the first layer's is 1."
            )

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Shapes:
    """A model's gradients."""

    title: str  # of the model
    gradients: tuple[Gradient, ...]  # in forward order, which determines the buckets

    def __post_init__(self) -> None:
        names = [gradient.name for gradient in self.gradients]
        if not names:
            raise ShapesError(f"{self.title} has no tensors. Write some, in forward order: {EXAMPLE}")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ShapesError(f"{self.title} has several tensors named {', '.join(twice)}; names must differ")

    @property
    def parameters(self) -> int:
        return sum(gradient.numel for gradient in self.gradients)

    def to_json(self) -> str:
        return json.dumps([[gradient.name, gradient.shape, gradient.share] for gradient in self.gradients])


def find_shapes(where: str, arguments: Sequence[str] = ()) -> Shapes:
    """Shapes by a built-in model's name, from a JSON file, or from a script that attaches, run with `arguments`.

    Raises ShapesError with the invalid part.
    """
    if where in BUILT_IN:
        model = BUILT_IN[where]
        return Shapes(model.title, appearing(list(model.layers())))
    path = Path(where)
    if not os.path.isfile(path):  # Path.is_file raises for a text that is too long for a name
        raise ShapesError(
            f"there are no shapes named {shown(where)}, and no such file. Choose from {', '.join(BUILT_IN)}; or write "
            f"a file: {EXAMPLE}"
        )
    return from_script(path, arguments) if path.suffix == ".py" else from_file(path)


def appearing(layers: Sequence[Layer]) -> tuple[Gradient, ...]:
    """The gradients of layers in forward order, with backward time proportional to multiply-adds."""
    whole = sum(layer.multiply_adds for layer in layers)
    over, gradients = 0.0, []
    for layer in reversed(layers):
        over += layer.multiply_adds
        share = min(1.0, over / whole)
        gradients += [Gradient(name, shape, share) for name, shape in reversed(list(layer.tensors.items()))]
    return tuple(reversed(gradients))


def from_file(path: Path) -> Shapes:
    """Shapes from JSON: [["name", [shape], share], ...] in forward order."""
    try:
        entries = read_json(bounded_file.read_bytes(path))
    except OSError as error:
        raise ShapesError(f"{path} cannot be read: {error.strerror}. Name another file") from error
    except ValueError as error:
        raise ShapesError(f"{path} is not JSON: {error}. Write {EXAMPLE}") from error
    if not isinstance(entries, list):
        raise ShapesError(f"{path} is not a list of tensors. Write {EXAMPLE}")
    return Shapes(str(path), tuple(_gradient(entry, path) for entry in entries))


def _gradient(entry: Any, path: Path) -> Gradient:
    match entry:
        case [str(name), [*shape], (int() | float()) as share] if (
            type(share) is not bool and not abs(share) > MOST_ELEMENTS
        ):
            return Gradient(name, tuple(shape), float(share))
    raise ShapesError(f"{path}: {json.dumps(entry)[:SHOWN_CHARACTERS]} is not [name, shape, share]. Write {EXAMPLE}")


def from_script(script: Path, arguments: Sequence[str]) -> Shapes:
    """The shapes of the model that a script attaches, with backward time proportional to parameters."""
    attached = attached_by(script, arguments, resolve("Dense()"))
    slots = [slot for _, layout in reversed(attached.layouts) for slot in reversed(layout.slots)]
    layers = [Layer(tensors={slot.name: slot.shape}, multiply_adds=slot.numel) for slot in slots]
    return Shapes(str(script), appearing(layers))
