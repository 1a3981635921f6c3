"""A coordinator and agents in one process, over loopback, closed after the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.comm.elastic.agent import MembershipAgent
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.membership.next_view import CoordinatorOptions

TOKEN = bytes(range(32))
DEAD_AFTER_SECONDS = 1.0
PATIENCE_SECONDS = 30.0  # of a test that fails
LIKE = json.dumps({"torch": "2.13.0", "recipe": "EveryStep()"})


class ElasticRun:
    """One coordinator, at one address also when it is started again, and the agents of workers."""

    def __init__(self, journal: Path | None = None, **options: Any) -> None:
        self.notes: list[str] = []
        self._noted = threading.Condition()
        self.options = {"least": 1, "most": 8, "initial": 2, "dead_after_seconds": DEAD_AFTER_SECONDS} | options
        self.journal, self.agents = journal, list[MembershipAgent]()
        self.closed: list[tuple[MembershipAgent, int]] = []
        self.server = self._serve(0)

    def _serve(self, port: int) -> CoordinatorServer:
        return CoordinatorServer(
            CoordinatorOptions(**self.options),
            token=TOKEN,
            address="127.0.0.1",
            port=port,
            journal=self.journal,
            note=self._note,
        )

    def _note(self, text: str) -> None:
        with self._noted:
            self.notes.append(text)
            self._noted.notify_all()

    def wait_for_note(self, part: str) -> str:
        with self._noted:
            assert self._noted.wait_for(lambda: any(part in note for note in self.notes), PATIENCE_SECONDS), self.notes
            return next(note for note in self.notes if part in note)

    def restart(self) -> None:
        self.server.close()
        self.server = self._serve(self.server.address[1])

    def agent(
        self, place: int | None = None, on_change: Callable[[int], None] | None = None, **options: Any
    ) -> MembershipAgent:
        def close(view: int) -> None:
            self.closed.append((made, view))
            if on_change is not None:
                on_change(view)

        made = MembershipAgent(
            self.server.address,
            TOKEN,
            place=place,
            on_change=close,
            dead_after_seconds=DEAD_AFTER_SECONDS,
            **options,
        )
        self.agents.append(made)
        return made

    def begin(self, count: int) -> list[MembershipAgent]:
        """Agents in the first view, by rank."""
        agents = [self.agent(place) for place in range(count)]
        for each in reversed(agents):
            each.here(("127.0.0.1", 1000 + agents.index(each)))
        for each in agents:
            view = each.first_view(PATIENCE_SECONDS)
            assert view.number == 1
            assert [member.number for member in view.members] == [each.number for each in agents]
        agents[0].attached(LIKE)
        return agents

    def close(self) -> None:
        for each in self.agents:
            each.close()
        self.server.close()


@contextmanager
def elastic_run(journal: Path | None = None, **options: Any) -> Iterator[ElasticRun]:
    run = ElasticRun(journal, **options)
    try:
        yield run
    finally:
        run.close()
