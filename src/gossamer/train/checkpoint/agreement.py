"""Agreement: runs an action on all ranks, and continues only if it succeeded on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.files import MALFORMED

AllGatherText = Callable[[str], list[str]]


def on_all_ranks(
    all_gather_text: AllGatherText, step: int, act: Callable[[], str], failing: str = "could be written"
) -> list[str]:
    """Run `act` on every rank. Returns the results by rank, or raises CheckpointError on all ranks if one failed."""
    try:
        outcome = "done " + act()
    except (CheckpointError, OSError, *MALFORMED) as failure:  # includes errors of a part's state_dict()
        outcome = f"lost {failure}"
    answers = all_gather_text(outcome)
    lost = [f"rank {who}: {text[5:]}" for who, text in enumerate(answers) if text.startswith("lost ")]
    if lost:
        raise CheckpointError(
            f"the checkpoint of step {step} was abandoned, since not every rank's part {failing}: {'; '.join(lost)}. "
            "Other checkpoints in the directory are unchanged."
        )
    return [text[5:] for text in answers]


@dataclass(frozen=True)
class SharedStep:
    """A step that all ranks save together, as one of them has it.

    Attributes:
        directory: of the checkpoints.
        step: number of the step.
        rank: this rank.
        all_gather_text: returns every rank's text, by rank.
    """

    directory: str
    step: int
    rank: int
    all_gather_text: AllGatherText

    def on_all_ranks(self, act: Callable[[], str], failing: str = "could be written") -> list[str]:
        """As `on_all_ranks`."""
        return on_all_ranks(self.all_gather_text, self.step, act, failing)
