"""Elastic policies in virtual time: workers that end as a test says, and a coordinator that knows whom it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from gossamer.launcher.elastic_policy import ElasticOrders, ElasticPolicy, ElasticWorker
from gossamer.launcher.failure import Failure, Origin
from gossamer.launcher.restart_policy import RestartBudget

numbers = count(1000)


class VirtualWorker:
    def __init__(self, place: int, initial: bool, most_restarts: int, now: list[float]) -> None:
        self.number, self._initial, self._now = place, initial, now
        self.budget = RestartBudget(most_restarts)
        self.due: float | None = None
        self.members: list[int] = []
        self.starts: list[float] = []
        self.lost_residual = ""
        self.is_finishing = self.lives = self.has_left = self.has_ever_attached = False
        self._attached = False
        self._exit_code: int | None = None
        self._origin, self._summary = Origin.KILLED, ""

    reported_failure = False
    member = property(lambda self: self.members[-1])
    age_seconds = property(lambda self: self._now[0] - self.starts[-1])
    attached = property(lambda self: self.lives and self._attached)
    holds_state = property(lambda self: self.attached or (self.lives and self._initial and len(self.starts) == 1))

    def start(self) -> None:
        self.lives, self._attached = True, False
        self.starts.append(self._now[0])
        self.members.append(next(numbers))

    def attach(self) -> None:
        self._attached = self.has_ever_attached = True

    def end(self, exit_code: int, summary: str = "", *, left: bool = False, echo: bool = False) -> None:
        self._exit_code, self._summary, self.has_left = exit_code, summary, left
        self._origin = Origin.KILLED if exit_code < 0 else Origin.ECHO if echo else Origin.RAISED

    def ended(self) -> int | None:
        if self._exit_code is None or not self.lives:
            return None
        self.lives, exit_code, self._exit_code = False, self._exit_code, None
        return exit_code

    def failure(self, exit_code: int, *, stopped: bool = False) -> Failure:
        return Failure(
            rank=self.number, exit_code=exit_code, moment=self._now[0], origin=self._origin, summary=self._summary
        )


@dataclass
class VirtualCoordinator:
    address: tuple[str, int] = ("127.0.0.1", 1)
    run: str = "0123456789abcdef0123"
    members: set[int] = field(default_factory=set)
    buried: list[int] = field(default_factory=list)
    finishing: bool = False
    ended: str = ""
    resumed: bool = False
    started: list[int] = field(default_factory=list)
    request: int | None = None
    expected: int | None = None

    def settle(self, note: object) -> None: ...
    def invite(self, lifetime_seconds: float | None, uses: int | None) -> str:
        return f"gossamer:{lifetime_seconds}-{uses}"

    def launched(self, number: int) -> None:
        self.started.append(number)

    def asked(self) -> int | None:
        asked, self.request = self.request, None
        return asked

    def gone(self, number: int) -> None:
        self.members.discard(number)
        self.buried.append(number)

    def expect(self, workers: int) -> None:
        self.expected = workers

    def close(self) -> None: ...


class VirtualRun:
    """A policy, its time and its notes. joins: beside another launcher's coordinator."""

    def __init__(
        self,
        workers: int,
        *,
        least: int = 1,
        restarts: int = 0,
        joins: bool = False,
        resumed: bool = False,
        served: bool = False,
    ) -> None:
        self.now = [100.0]
        self.notes: list[str] = []
        self.coordinator = VirtualCoordinator(resumed=resumed)
        orders = ElasticOrders(
            initial=workers,
            least=least,
            patience_seconds=1800.0,
            linger_seconds=30.0,
            join_command=None if joins else "gossamer run --join HOST",
            logs=Path("logs"),
            served=served,
        )
        self.workers: list[VirtualWorker] = []

        def hire(place: int, initial: bool) -> ElasticWorker:
            self.workers.append(VirtualWorker(place, initial, restarts, self.now))
            return self.workers[-1]

        self.policy = ElasticPolicy(orders, hire, self.coordinator, self.notes.append)
        self.policy.begin()

    def attach(self, *places: int) -> VirtualRun:
        for worker in self.workers:
            if not places or worker.number in places:
                worker.attach()
        return self

    def after(self, seconds: float = 0.0) -> bool:
        self.now[0] += seconds
        return self.policy.look(self.now[0])

    @property
    def living(self) -> list[int]:
        return [worker.number for worker in self.workers if worker.lives]
