"""Model state: the trained parameters and averaged buffers of a model as one flat tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.errors import AttachError


@dataclass(frozen=True)
class ModelState:
    """Names and shapes of the exchanged tensors, and their dtype, at least float32.

    These are the trained parameters and the floating-point buffers, such as BatchNorm's statistics. Frozen parameters
    are equal on all devices. Counters, such as BatchNorm's number of batches, are local.
    """

    layout: Layout
    dtype: torch.dtype
    parameters: int  # number of parameters, first in the layout; the others are buffers

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state's layout of a model. Raises AttachError if no parameter is trained."""
        parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if not parameters:
            raise AttachError(
                "The model has no trainable parameter, so devices have nothing to learn. Call requires_grad_() on "
                "the parameters to train."
            )
        tensors = parameters | averaged_buffers(model)
        dtype = torch.float32
        for each in tensors.values():
            dtype = accumulation_dtype(torch.promote_types(dtype, each.dtype))
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        return cls(Layout.of(shapes), dtype, len(parameters))

    def read(self, model: nn.Module) -> FlatTensors:
        """Copy a model's state to (n,) on the CPU."""
        packed = FlatTensors.zeros(self.layout, dtype=self.dtype, device=torch.device("cpu"))
        tensors = self.tensors(model)
        with torch.no_grad():
            for name, view in packed.items():
                view.copy_(tensors[name])
        return packed

    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Overwrite a model's parameters and buffers with (n,)."""
        tensors = self.tensors(model)
        with torch.no_grad():
            for name, view in FlatTensors(flat, self.layout).items():
                tensors[name].copy_(view)

    def tensors(self, model: nn.Module) -> Mapping[str, Tensor]:
        """A model's own tensors by name, in the layout's order."""
        found = dict(model.named_parameters()) | dict(model.named_buffers())
        return {slot.name: found[slot.name] for slot in self.layout}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.layout.names[: self.parameters]

    @cached_property
    def trained(self) -> int:
        """Number of entries that belong to parameters, before those of buffers."""
        return sum(self.layout.sizes[: self.parameters])

    @cached_property
    def fingerprint(self) -> str:
        return self.layout.fingerprint() + str(self.dtype).removeprefix("torch.")


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers in the state_dict."""
    kept = model.state_dict(keep_vars=True)
    return {name: each for name, each in model.named_buffers() if name in kept and each.is_floating_point()}


def save_model(model: nn.Module, path: Path) -> str:
    """Replace a file by the model's state_dict. Returns the line of code that loads it. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save(model.state_dict(), file)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True))"
