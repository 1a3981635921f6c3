"""Parameter views: a model's parameters by name, to be copied and swapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.errors import AttachError


@torch.no_grad()
def copy_parameters(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Overwrite all of `new` by what `old` has under the same names."""
    for name, tensor in new.items():
        tensor.copy_(old[name])


@contextmanager
def swapped_in(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, `parameters` have those of `values` that are there."""
    places = {name: parameter.detach() for name, parameter in parameters.items() if name in values}
    kept = {name: place.clone() for name, place in places.items()}
    copy_parameters(values, places)
    try:
        yield
    finally:
        copy_parameters(kept, places)


def sparse_names(model: nn.Module) -> frozenset[str]:
    """Names of the trainable parameters whose gradients are sparse, as the modules that hold them say by an attribute:
    nn.Embedding(..., sparse=True)."""
    said = {
        id(p)
        for module in model.modules()
        if getattr(module, "sparse", False) is True
        for p in module.parameters(False)
    }
    return frozenset(name for name, parameter in trainable(model).items() if id(parameter) in said)


def refuse_no_module(model: object) -> None:
    """Raise AttachError for what is no model that was built."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"this {type(model).__name__}"
        raise AttachError(
            f"{given} is no torch.nn.Module, whose parameters could be trained. Pass the model that was built: model = "
            "Net(), and gossamer.attach(model, optimizer), with the model first."
        )


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """Parameters with gradients by name, tied ones once, without the prefix that torch.compile puts before names."""
    refuse_no_module(model)
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
