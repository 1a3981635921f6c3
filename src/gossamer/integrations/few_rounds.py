"""Notice of a training with few rounds, for libraries that know the number of steps before they train."""

from __future__ import annotations

from gossamer import events, init
from gossamer.plan.retained_benefit import low_rounds_remark
from gossamer.train.session.session import Session


def notice_few_rounds(session: Session, steps: float) -> None:
    """Log a notice on rank 0 if `steps` have so few rounds of the session's recipe that little would be retained.

    Args:
        session: attached.
        steps: optimizer steps of the training; not above 0 or inf where they are unknown.
    """
    world = init()
    if world.rank == 0 and world.size > 1 and 0 < steps < float("inf"):
        remark = low_rounds_remark(session.recipe, int(steps))
        if remark is not None:
            events.notice(remark)
