"""Admission gate: lets newcomers of an elastic run in before a step's first pass, where several passes make a step."""

from __future__ import annotations

from functools import partial

from gossamer.train.synchronizers.base import SyncContext


class AdmissionGate:
    """Newcomers wait until a step is over, and all passes of the next one are dealt out among who makes them.

    They would otherwise come into the exchange that ends a step, with passes of their own on top of all that it has.
    gates: whether several passes make a step.
    """

    def __init__(self, context: SyncContext, *, gates: bool) -> None:
        self._context, self.gates = context, gates
        self.awaited = False  # alike on all ranks, after the same exchange

    def note(self) -> None:
        """An exchange is over: whether newcomers waited when it began."""
        self.awaited = self.gates and self._context.comm_thread.is_awaited

    def joined(self) -> None:
        """This worker is a newcomer: it makes the exchange by which it was let in, with those who let it in."""
        self.awaited = self.gates

    def let_in(self, *, admits: bool = True) -> None:
        """Let in who is awaited: all ranks come here before their next exchange. admits: whether this one trains."""
        if self.awaited:
            self.awaited = False
            go_on = partial(self._context.transport.all_gather_text, "go on")
            self._context.comm_thread.exchange(go_on, admits=admits).wait()
