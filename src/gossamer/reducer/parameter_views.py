"""Parameter views: a model's parameters by name, to be copied and swapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter


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


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """Parameters with gradients by name, tied ones once, without the prefix that torch.compile puts before names."""
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
