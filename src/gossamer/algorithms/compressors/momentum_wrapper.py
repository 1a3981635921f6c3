"""Base of compressors that do a part of the optimizer's work around an inner compressor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dgc import require_clip
from gossamer.algorithms.compressors.wrapper import Wrapper


class MomentumWrapper(Wrapper):
    """Compute moments or updates from gradients before `inner` sends them, or from the averaged result.

    Only Route may wrap it, so a recipe adds other wrappers, such as Feedback, inside. clip: norm limit of each tensor's
    gradient, clip sqrt(n) per worker; see DGC.
    """

    clip: float | None

    def __post_init__(self) -> None:
        require_clip(self.clip, type(self).__name__)

    @property
    def must_be_outermost(self) -> bool:
        return True

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        return replace(self, inner=self.inner.completed(complete))  # type: ignore[type-var]
