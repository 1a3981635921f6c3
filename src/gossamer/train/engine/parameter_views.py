"""Parameter views: a model's parameters and buffers by name, to copy and swap them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.errors import AttachError


@torch.no_grad()
def copy_parameters(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors of `new` with those of `old` under the same names."""
    for name, tensor in new.items():
        tensor.copy_(old[name])


@contextmanager
def swapped_in(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor], model: nn.Module) -> Iterator[None]:
    """Context manager that writes `values` into `parameters` and other state of `model`, and restores it afterwards.

    A buffer that a module replaces within the block is restored as well.
    """
    held = {name: place for name, place in state_places(model).items() if name in values and name not in parameters}
    others = {name: holder[leaf] for name, (holder, leaf) in held.items()}
    places = {name: each.detach() for name, each in {**parameters, **others}.items() if name in values}
    kept = {name: place.clone() for name, place in places.items()}
    copy_parameters(values, places)
    try:
        yield
    finally:
        copy_parameters(kept, places)
        for name, (holder, leaf) in held.items():
            holder[leaf] = others[name]


Place = tuple[dict[str, Tensor], str]  # the dictionary of a module that holds a tensor, and its key there


def state_places(model: nn.Module, *, saved: bool = False) -> dict[str, Place]:
    """The places of a model's parameters and buffers, by name; tied parameters once.

    Args:
        saved: without non-persistent buffers, as in a state_dict().
    """
    found: dict[str, Place] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        parameters, buffers = cast(dict[str, Tensor], module._parameters), cast(dict[str, Tensor], module._buffers)
        hidden = module._non_persistent_buffers_set if saved else set()
        for leaf, parameter in parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[plain_name(path, leaf)] = parameters, leaf
        kept = [leaf for leaf, buffer in buffers.items() if buffer is not None and leaf not in hidden]
        found |= {plain_name(path, leaf): (buffers, leaf) for leaf in kept}
    return found


def state_of(model: nn.Module, *, saved: bool = False) -> dict[str, Tensor]:
    """A model's parameters and buffers by name, as in `state_places`; not copies."""
    return {name: holder[leaf].detach() for name, (holder, leaf) in state_places(model, saved=saved).items()}


def plain_name(path: str, leaf: str) -> str:
    """A tensor's name in the model, without the prefix of torch.compile."""
    return f"{path}.{leaf}".removeprefix(".").replace("_orig_mod.", "")


def sparse_names(model: nn.Module) -> frozenset[str]:
    """Names of the trainable parameters with sparse gradients, according to the attribute `sparse` of their modules:
    nn.Embedding(..., sparse=True)."""
    sparse = {
        id(p)
        for module in model.modules()
        if getattr(module, "sparse", False) is True
        for p in module.parameters(False)
    }
    return frozenset(name for name, parameter in trainable(model).items() if id(parameter) in sparse)


def refuse_no_module(model: object) -> None:
    """Raise AttachError unless `model` is a module instance."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"this {type(model).__name__}"
        raise AttachError(
            f"{given} is not a torch.nn.Module instance, so it has no parameters to train. Pass the instance first: "
            "model = Net(), and gossamer.attach(model, optimizer)."
        )


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """Trainable parameters by name, tied ones once, without the prefix of torch.compile."""
    refuse_no_module(model)
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
