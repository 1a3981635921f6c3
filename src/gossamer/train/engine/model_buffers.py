"""Model buffers: buffers such as BatchNorm's statistics, by the module that holds them.

If parameters are averaged, train/engine/averaged_state averages buffers and changing frozen parameters as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor, nn

from gossamer.base.kernels import all_finite
from gossamer.train.engine.frozen_parameters import FrozenParameters
from gossamer.train.engine.parameter_views import plain_name
from gossamer.train.engine.step_decision import Flags


class ModelBuffers:
    """A model's current buffers, by the module that holds them."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._holders = model, _holders(model)
        self.frozen = FrozenParameters(model)
        self._constant: set[str] = set()
        self.see_constants()

    def see_model(self) -> None:
        """Include modules that the model has gained, after all workers received the same buffers for them. Constants
        among the other buffers stay as they were: a buffer that is non-finite on one rank only is not a constant."""
        before, constant = {id(holder) for _, holder in self._holders}, self._constant
        self._holders = _holders(self._model)
        self.frozen.see_model()
        self.see_constants()
        for path, holder in self._holders:
            if id(holder) in before:
                names = {plain_name(path, leaf) for leaf in holder}
                self._constant = (self._constant - names) | (constant & names)

    def see_constants(self) -> None:
        """Treat buffers that are not finite now as constants, such as masks. Buffers must be equal on all workers."""
        self._constant = {name for name, buffer in self._named() if _is_unbounded(buffer)}
        self.frozen.note()

    def averaged(self) -> dict[str, Tensor]:
        """State without gradients that is averaged together with parameters, by name, in the same order on all ranks.

        These are floating-point buffers, except constants; buffers with one integer, such as BatchNorm's count of
        batches; and frozen parameters that the script changes. It includes non-persistent buffers. Larger integer
        buffers, such as masks, remain local to each worker.
        """
        named = [(name, buffer) for name, buffer in self._named() if name not in self._constant]
        numbers = {name: buffer for name, buffer in named if buffer.is_floating_point()}
        counters = {name: buffer for name, buffer in named if is_counter(buffer)}
        return numbers | counters | self.frozen.averaged

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for path, holder in self._holders:
            for leaf, buffer in holder.items():
                if buffer is not None:
                    yield plain_name(path, leaf), buffer

    def __len__(self) -> int:
        return len(self._holders)

    def __call__(self) -> list[list[Tensor]]:
        return [[buffer for buffer in holder.values() if buffer is not None] for _, holder in self._holders]


def is_counter(tensor: Tensor) -> bool:
    """Whether the tensor is one integer."""
    return tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def _is_unbounded(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and not all_finite(buffer)


def _holders(model: nn.Module) -> list[tuple[str, dict[str, Tensor | None]]]:
    """Paths and buffers of the modules that have buffers."""
    holders = ((path, each._buffers) for path, each in model.named_modules())
    return [(path, held) for path, held in holders if any(each is not None for each in held.values())]


class BufferVersions:
    """Detects the modules with buffers that a step has changed."""

    def __init__(self, buffers: Callable[[], Sequence[Sequence[Tensor]]]) -> None:
        self._buffers = buffers
        self.note()

    def note(self) -> None:
        """Use the current versions as the reference."""
        self._noted = self._now()

    def look(self) -> tuple[Sequence[Sequence[Tensor]], Flags]:
        """The buffers by module, and whether those of each module have changed."""
        moved = [new != old for new, old in zip(self._now(), self._noted, strict=True)]
        return self._buffers(), np.array(moved, dtype=bool)

    def _now(self) -> list[list[_Version]]:
        """Versions of all buffers. Some BatchNorm buffers change without a new version, but others of their module
        get one."""
        return [[_Version(buffer, buffer._version) for buffer in group] for group in self._buffers()]


class _Version:
    """A tensor and its version counter. It references the tensor, so that no later tensor can have the same id."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        self._tensor, self._version = tensor, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self._tensor is other._tensor and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def moving_buffers(model: nn.Module) -> list[int]:
    """Bytes of each buffer that training moves in every step: running statistics. Each is a broadcast of its own."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer.nbytes for norm in norms for buffer in norm.buffers(recurse=False)]
