"""Model buffers: BatchNorm's statistics and the like, by the module that holds them.

Where parameters are averaged, gossamer.reducer.averaged_state averages them along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor, nn

from gossamer.kernels import all_finite
from gossamer.reducer.step_report import Flags


class ModelBuffers:
    """A model's buffers by the module that holds them, as they are at each moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._holders = model, _holders(model)
        self._constant: set[tuple[int, str]] = set()
        self.see_constants()

    def see_model(self) -> None:
        """Take in modules that the model has gained, once all workers were given the same buffers of them. What was
        known of the others is kept: a buffer that is not finite on one rank alone is no constant."""
        before, constant = self._holders, self._constant
        self._holders = _holders(self._model)
        self.see_constants()
        for number, holder in enumerate(self._holders):
            for place in (place for place, each in enumerate(before) if each is holder):
                self._constant -= {(number, name) for name in holder}
                self._constant |= {(number, name) for name in holder if (place, name) in constant}

    def see_constants(self) -> None:
        """Take buffers that are not finite now for constants, such as masks. After all workers were given the same."""
        self._constant = {key for key, buffer in self._floating() if not all_finite(buffer)}

    def averaged(self) -> list[Tensor]:
        """Those that workers average: counters stay each worker's own, and constants are alike."""
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


def _holders(model: nn.Module) -> list[dict[str, Tensor | None]]:
    return [module._buffers for module in model.modules() if any(True for _ in module.buffers(False))]


class BufferVersions:
    """Finds out which modules' buffers a step has changed."""

    def __init__(self, buffers: Callable[[], Sequence[Sequence[Tensor]]]) -> None:
        self._buffers = buffers
        self.note()

    def note(self) -> None:
        """What changes from now on has moved."""
        self._noted = self._now()

    def moved(self) -> Flags:
        """By module."""
        return np.array([new != old for new, old in zip(self._now(), self._noted, strict=True)], dtype=bool)

    def _now(self) -> list[tuple[tuple[int, int], ...]]:
        """Some of BatchNorm's buffers change without their version counters telling, others of the module do tell."""
        return [tuple((id(buffer), buffer._version) for buffer in group) for group in self._buffers()]


def moving_buffers(model: nn.Module) -> list[int]:
    """Bytes of each buffer that training moves in every step: running statistics. Each is a broadcast of its own."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer.nbytes for norm in norms for buffer in norm.buffers(recurse=False)]


def moving_bytes(model: nn.Module) -> int:
    """Bytes of all of them."""
    return sum(moving_buffers(model))
