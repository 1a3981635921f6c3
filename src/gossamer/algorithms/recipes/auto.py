"""Auto: a recipe that is selected while training, from measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.base.term import Term
from gossamer.errors import require


@dataclass(frozen=True, kw_only=True, repr=False)
class Auto(Term):
    """Begin with local steps, or with Dense(), and change the recipe as links and gradients are measured.

    Args:
        most_steps: limit of the steps to the same loss, relative to Dense(), measured in docs/how-to/auto.md; 1.0
            allows Dense() in float32 and bfloat16, and Int8().
        local_steps: whether workers may train with local steps (DiLoCo). Use False for a loop that evaluates or saves
            its own model outside of session.averaged_parameters.
        steps: optimizer steps of the training; None: unknown. A recipe of local steps is used only in trainings that
            are long enough for it; without this number, only recipes for which 1,000 steps are enough.
    """

    kind: ClassVar[str] = "automatic"

    most_steps: float = 3.0
    local_steps: bool = True
    steps: int | None = None

    def __post_init__(self) -> None:
        require(
            self.most_steps >= 1,
            f"most_steps must be the steps that a recipe may need relative to Dense(), 1 or more, got "
            f"{self.most_steps}. Write Auto(most_steps=1.1), or Dense() for a fixed recipe.",
        )
        require(
            self.steps is None or self.steps > 0,
            f"steps must be the optimizer steps of the training, 1 or more, got {self.steps}. Write Auto(steps=20000), "
            "or leave steps out if they are unknown.",
        )
