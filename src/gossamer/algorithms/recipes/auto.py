"""Auto: stands for a recipe in its text, and leaves the choice of one to what is measured while training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.base.term import Term
from gossamer.errors import require


@dataclass(frozen=True, kw_only=True, repr=False)
class Auto(Term):
    """Begin with local steps, or with Dense(), and change the recipe as links and gradients are measured.

    most_steps: a rung of the ladder that needs more than this many times the steps of Dense() to the same loss, as
    measured in docs/auto.md, is never taken; 1.0 allows Dense() in float32 and bfloat16, and Int8().
    local_steps: whether workers may train apart for a while (DiLoCo); a loop that evaluates or saves its own model,
    outside of session.averaged_parameters, needs False.
    """

    kind: ClassVar[str] = "automatic"

    most_steps: float = 3.0
    local_steps: bool = True

    def __post_init__(self) -> None:
        require(
            self.most_steps >= 1,
            f"most_steps is how many times the steps of Dense() a recipe may need, 1 or more, not {self.most_steps}. "
            "Write Auto(most_steps=1.1), or Dense() for a recipe that stays.",
        )
