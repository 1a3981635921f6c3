"""Agreement: lets all ranks act on a checkpoint, and go on only where all of them could."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.files import MALFORMED

AllGatherText = Callable[[str], list[str]]


def on_all_ranks(
    all_gather_text: AllGatherText, step: int, act: Callable[[], str], failing: str = "could be written"
) -> list[str]:
    """Act on every rank; returns the results by rank, or raises on all ranks where one failed."""
    try:
        told = "done " + act()
    except (CheckpointError, OSError, *MALFORMED) as failure:  # what a part's own state_dict() raises, too
        told = f"lost {failure}"
    answers = all_gather_text(told)
    lost = [f"rank {who}: {text[5:]}" for who, text in enumerate(answers) if text.startswith("lost ")]
    if lost:
        raise CheckpointError(
            f"the checkpoint of step {step} was given up, since not every rank's part {failing}: {'; '.join(lost)}. "
            "Others in the same directory are as they were."
        )
    return [text[5:] for text in answers]
