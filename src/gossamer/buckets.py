"""Gradients live in buckets: flat buffers per device and dtype, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.compressors import Compressor
from gossamer.core.aggregation import At, State
from gossamer.core.layout import Layout, Packed, Slot, dense_stride
from gossamer.errors import AttachError
from gossamer.kernels import all_finite

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
        self._shown = self.flat._version

    @property
    def packed(self) -> Packed:
        return Packed(self.flat, self.layout)

    @property
    def room(self) -> Tensor:
        """Where a mean may be written: gradients are not needed once they have left."""
        return self.flat

    @property
    def residual_bytes(self) -> int:
        return sum(packed.flat.nbytes for packed in self.state.values())

    def point(self, used: Set[str]) -> None:
        """Let the gradients of `used` parameters lie here, and take away those of the others."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.views[name] if name in used else None
        self._shown = self.flat._version

    @property
    def touched(self) -> bool:
        """Whether anybody wrote to the gradients since they were shown, as clipping does."""
        return self.flat._version != self._shown

    def commit(self, following: State, used: Set[str], correction: float) -> None:
        """The average is here: remember, multiply by `correction`, and show it to the optimizer.

        What nobody used was not exchanged: it keeps its state and has no gradient.
        """
        for name in self.parameters.keys() - used:
            for key, packed in self.state.items():
                if name in packed.layout.by_name:
                    following[key][name].copy_(packed[name])
        self.state = following.after(self.state)
        if correction != 1.0:
            self.flat.mul_(correction)
        self.point(used)

    def state_by_name(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {what: tensor}}, as views."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, packed in self.state.items():
            for name, view in packed.items():
                found.setdefault(name, {})[key] = view
        return found


def state_by_name(buckets: Iterable[Bucket]) -> dict[str, dict[str, Tensor]]:
    """{parameter name: {what: tensor}} of all buckets, as views."""
    return {name: remembered for bucket in buckets for name, remembered in bucket.state_by_name().items()}


def copy_state(old: Mapping[str, Mapping[str, Tensor]], new: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Overwrite all of `new` by what `old` has under the same names."""
    for name, remembered in new.items():
        for key, tensor in remembered.items():
            tensor.copy_(old[name][key])


@torch.no_grad()
def copy_parameters(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Overwrite all of `new` by what `old` has under the same names."""
    for name, tensor in new.items():
        tensor.copy_(old[name])


@contextmanager
def lent(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, `parameters` have those of `values` that are there."""
    places = {name: parameter.detach() for name, parameter in parameters.items() if name in values}
    kept = {name: place.clone() for name, place in places.items()}
    copy_parameters(values, places)
    try:
        yield
    finally:
        copy_parameters(kept, places)


def arrange(parameters: Mapping[str, Tensor], compressor: Compressor) -> Layout:
    """The layout of one bucket: tensors that the compressor treats alike lie side by side."""

    def group(name: str) -> int:
        return compressor.group(slot_of(name, parameters[name]))

    return Layout.of({name: parameters[name] for name in sorted(parameters, key=group)})


def slot_of(name: str, tensor: Tensor) -> Slot:
    """What a compressor may know of a tensor before it has a place."""
    return Slot(name, tuple(tensor.shape), 0, dense_stride(tensor))


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


def fragments_of(parameters: Mapping[str, Parameter], count: int) -> list[dict[str, Parameter]]:
    """So many parts of about equal bytes: from the largest tensor on, each goes where least is so far.

    In the parameters' own order within each part. Raises AttachError where there are fewer tensors than parts.
    """
    if len(parameters) < count:
        raise AttachError(
            f"{len(parameters)} tensors do not make {count} fragments, and a turn without any would be for nothing: "
            f"write fragments={len(parameters)} at most."
        )
    places: dict[str, int] = {}
    filled = [0] * count
    for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].nbytes):
        place = filled.index(min(filled))
        places[name] = place
        filled[place] += parameter.nbytes
    return [{name: p for name, p in parameters.items() if places[name] == place} for place in range(count)]


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """Parameters with gradients by name, tied ones once, without the prefix that torch.compile puts before names."""
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def layout_text(buckets: Iterable[Bucket]) -> str:
    """A fingerprint of everything that is exchanged."""
    return ";".join(layout.fingerprint() + dtype for dtype, layout in layouts(buckets))


def layouts(buckets: Iterable[Bucket]) -> list[tuple[str, Layout]]:
    return [(str(bucket.flat.dtype).removeprefix("torch."), bucket.layout) for bucket in buckets]


class Buffers:
    """A model's buffers by the module that holds them, as they are at each moment."""

    def __init__(self, model: nn.Module) -> None:
        self._holders = [module._buffers for module in model.modules() if any(True for _ in module.buffers(False))]
        self._constant: set[tuple[int, str]] = set()
        self.see_constants()

    def see_constants(self) -> None:
        """Take what is not finite now for constants, such as masks. After all workers were given the same."""
        self._constant = {key for key, buffer in self._floating() if not all_finite(buffer)}

    def averaged(self) -> list[Tensor]:
        """Those that workers average: counters stay each worker's own, and constants are the same anyway."""
        return [buffer for key, buffer in self._floating() if key not in self._constant]

    def _floating(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        for number, holder in enumerate(self._holders):
            for name, buffer in holder.items():
                if buffer is not None and buffer.is_floating_point():
                    yield (number, name), buffer

    def __len__(self) -> int:
        return len(self._holders)

    def __call__(self) -> list[list[Tensor]]:
        return [[buffer for buffer in holder.values() if buffer is not None] for holder in self._holders]


def moving_bytes(model: nn.Module) -> int:
    """Bytes of the buffers that training moves in every step: running statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return sum(buffer.nbytes for norm in norms for buffer in norm.buffers(recurse=False))
