"""Stop blocks: end what a loop is in that goes on after training was stopped: its epoch, its session, or the script."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gossamer import events
from gossamer.comm.runtime import interruption
from gossamer.errors import Stopped
from gossamer.train.engine.extension import Extension, Extensions

SCRIPT_ENDS = (
    "training was asked to stop, and its loop went on, in no block that it could leave: so the script ends here on "
    "every rank, with exit code 0, and the lines below the loop do not run. Write `if session.should_stop: break` at "
    "the loop's end, or `with gossamer.attach(...) as session:` around the loop, to go on there."
)


class StopBlocks(Extension):
    """Counts the blocks around the loop that can be left when training is over; without one, the script is.

    end_session: closes the session at the script's end, as its block would. says: whether to tell the user, which one
    rank does. It acts in steps once training is over.
    """

    order = 1

    def __init__(self, end_session: Callable[[], None], extensions: Extensions, *, says: bool) -> None:
        self._end_session, self._extensions, self._says = end_session, extensions, says
        self.blocks, self.over = 0, False

    def end(self) -> None:
        """Training is over."""
        self.over = True
        self._extensions.add(self)

    def pass_began(self) -> None:
        """Leave the innermost block by raising Stopped; after Ctrl-C, KeyboardInterrupt."""
        if not self.blocks:
            atexit.register(self._end_session)
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
