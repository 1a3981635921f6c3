"""Gradients live in buckets: flat buffers per device and dtype, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.compressors import Compressor
from gossamer.layout import Layout, Packed, Slot, dense_stride
from gossamer.words import At, State

BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Gradients that leave together: `flat` holds them, `state` is what the compressor remembers about them."""

    def __init__(self, parameters: Mapping[str, Parameter], compressor: Compressor, at: At) -> None:
        self.layout = arrange(parameters, compressor)
        example = next(iter(parameters.values()))
        self.flat = torch.zeros(self.layout.numel, dtype=example.dtype, device=example.device)
        self.parameters = {slot.name: parameters[slot.name] for slot in self.layout}
        self.views = dict(self.packed.items())
        self.state: State = compressor.init(self.packed, at)
        self.missing = set(self.layout.names)

    @property
    def packed(self) -> Packed:
        return Packed(self.flat, self.layout)

    @property
    def residual_bytes(self) -> int:
        return sum(packed.flat.nbytes for packed in self.state.values())

    def adopt(self, name: str) -> None:
        """Move a fresh gradient into the bucket and let `.grad` point there."""
        parameter, view = self.parameters[name], self.views[name]
        if parameter.grad is not None and not same_memory(parameter.grad, view):
            view.copy_(parameter.grad)
            parameter.grad = view

    def holds(self, name: str) -> bool:
        """Whether the parameter's gradient lies in this bucket already."""
        grad = self.parameters[name].grad
        return grad is not None and same_memory(grad, self.views[name])

    def restore(self, names: Iterable[str], following: State) -> None:
        """Give these tensors their old state back in `following`: what nobody used was not exchanged."""
        for name in names:
            for key, packed in self.state.items():
                if name in packed.layout.by_name:
                    following[key][name].copy_(packed[name])

    def state_by_name(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {what: tensor}}, as views."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, packed in self.state.items():
            for name, view in packed.items():
                found.setdefault(name, {})[key] = view
        return found


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


def arrange(parameters: Mapping[str, Tensor], compressor: Compressor) -> Layout:
    """The layout of one bucket: tensors that the compressor treats alike lie side by side."""

    def group(name: str) -> int:
        tensor = parameters[name]
        return compressor.group(Slot(name, tuple(tensor.shape), 0, dense_stride(tensor)))

    return Layout.of({name: parameters[name] for name in sorted(parameters, key=group)})


def divide(parameters: Mapping[str, Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[dict[str, Parameter]]:
    """Which parameters share a bucket: in reverse order, since gradients appear roughly from the last to the first.

    A bucket holds one device and dtype and ends when it reaches `bucket_bytes`; larger tensors are not split.
    """
    done: list[dict[str, Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], dict[str, Parameter]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kind = (parameter.device, parameter.dtype)
        bucket = filling.setdefault(kind, {})
        bucket[name] = parameter
        if sum(p.nbytes for p in bucket.values()) >= bucket_bytes:
            done.append(filling.pop(kind))
    return done + list(filling.values())


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """Parameters with gradients by name, tied ones once, without the prefix that torch.compile puts before names."""
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def layouts(buckets: Iterable[Bucket]) -> list[tuple[str, Layout]]:
    return [(str(bucket.flat.dtype).removeprefix("torch."), bucket.layout) for bucket in buckets]


def buffer_groups(model: nn.Module) -> list[list[Tensor]]:
    """The model's buffers, by the module that holds them."""
    groups = [list(module.buffers(recurse=False)) for module in model.modules()]
    return [group for group in groups if group]


def moving_bytes(model: nn.Module) -> int:
    """Bytes of the buffers that training moves in every step: running statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return sum(buffer.nbytes for norm in norms for buffer in norm.buffers(recurse=False))
