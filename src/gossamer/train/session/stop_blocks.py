"""Stop blocks: end what a loop is in that goes on after training was stopped: its epoch, its session, or the script."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gossamer import events
from gossamer.comm.runtime import interruption
from gossamer.errors import Stopped

SCRIPT_ENDS = (
    "training was asked to stop, and its loop went on, in no block that it could leave: so the script ends here on "
    "every rank, with exit code 0, and the lines below the loop do not run. Write `if session.should_stop: break` at "
    "the loop's end, or `with gossamer.attach(...) as session:` around the loop, to go on there."
)


class StopBlocks:
    """Counts the blocks around the loop that can be left when training is over; without one, the script is.

    close: closes the session at the script's end, as its block would. says: whether to tell the user, which one rank
    does.
    """

    def __init__(self, close: Callable[[], None], *, says: bool) -> None:
        self._close, self._says = close, says
        self.blocks, self.over = 0, False

    def leave_if_over(self) -> None:
        """Where training is over, leave the innermost block by raising Stopped; after Ctrl-C, KeyboardInterrupt."""
        if not self.over:
            return
        if not self.blocks:
            atexit.register(self._close)
            if self._says and not interruption.current.pending:
                events.notice(SCRIPT_ENDS)
        raise interruption.current.error()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """A block that ends where this session's training was stopped, so that what stands below it runs."""
        self.blocks += 1
        try:
            yield
        except Stopped:
            if not self.over:
                raise  # another session's
        finally:
            self.blocks -= 1
