"""Base of compressors that do a part of the optimizer's work around another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dgc import require_clip
from gossamer.algorithms.compressors.wrapper import Wrapper


class MomentumWrapper(Wrapper):
    """A compressor that makes moments or updates of gradients before `inner` sends them, or of what it has sent.

    Nothing but Route may stand around it, so that what a recipe adds, such as Feedback, it adds within. clip: of each
    tensor's fresh gradient, to a norm of at most clip sqrt(n): see DGC.
    """

    clip: float | None

    def __post_init__(self) -> None:
        require_clip(self.clip, type(self).__name__)

    @property
    def must_be_outermost(self) -> bool:
        return True

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        return replace(self, inner=self.inner.completed(complete))  # type: ignore[type-var]
