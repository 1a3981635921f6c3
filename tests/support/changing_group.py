"""Workers that come and go while they draw from shards of one dataset, and a count of what was used in which epoch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from gossamer.train.sampler import Shard, taken_up
from gossamer.train.sampler.position import Position, Regrouping, State
from gossamer.train.session.tracked_parts import TrackedLoader

Used = tuple[int, tuple[int, ...]]  # (epoch, samples)
Make = Callable[[int, int], Shard]  # of rank and size


class FetchingAhead(DataLoader[Any]):
    """Has asked its sampler for three batches more than the loop was given, as loaders with workers have."""

    def __iter__(self) -> Any:
        waiting: deque[Any] = deque()
        for batch in super().__iter__():
            waiting.append(batch)
            if len(waiting) > 3:
                yield waiting.popleft()
        yield from waiting


def indices(shard: Shard) -> Any:
    return ((index,) for index in shard)


def batches(shard: Shard) -> Any:
    return DataLoader(range(10**6), 3, sampler=shard, collate_fn=tuple)  # type: ignore[arg-type]


def batches_ahead(shard: Shard) -> Any:
    return FetchingAhead(range(10**6), 3, sampler=shard, collate_fn=tuple)  # type: ignore[arg-type]


def tracked(shard: Shard) -> Any:
    return TrackedLoader(batches(shard))


def tracked_ahead(shard: Shard) -> Any:
    return TrackedLoader(batches_ahead(shard))


class Looping:
    """A worker's loop over its epochs, one step at a time."""

    def __init__(self, shard: Shard, read: Callable[[Shard], Any]) -> None:
        self.shard, self._read, self._loader = shard, read, read(shard)
        self._under_way: Iterator[Any] | None = None

    def step(self) -> Used:
        for _ in range(100):  # epochs in which this worker has nothing
            if self._under_way is None:
                # A sampler by itself is read again by another generator
                self._under_way = iter(self._read(self.shard) if self._read is indices else self._loader)
            if (samples := next(self._under_way, None)) is not None:
                return self.shard.epoch, samples
            self._under_way = None
        raise AssertionError("nothing to draw in a hundred epochs")


@dataclass
class Worker:
    """A loop, what it used since the last change, and copies of it that were resumed from its state."""

    loop: Looping
    copies: list[Looping] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)

    def step(self) -> Used:
        used = self.loop.step()
        for copy in self.copies:
            assert copy.step() == used, "a resumed worker goes another way"
            assert copy.shard.state_dict() == self.loop.shard.state_dict()
            assert len(copy.shard) == len(self.loop.shard)
        self.used.append(used)
        return used


class ChangingGroup:
    """Workers, by rank, and what all of them have used."""

    def __init__(self, make: Make, total: int, size: int, read: Callable[[Shard], Any]) -> None:
        self._make, self._total, self._read = make, total, read
        self.workers = [self._worker(rank, size) for rank in range(size)]
        self.used: dict[int, Counter[int]] = {}
        self.given_up: set[int] = set()  # epochs of which a lost worker had something left, and nobody else

    def _worker(self, rank: int, size: int) -> Worker:
        return Worker(Looping(self._make(rank, size), self._read))

    def step(self, rank: int) -> None:
        epoch, samples = self.workers[rank].step()
        self.used.setdefault(epoch, Counter()).update(samples)

    def step_all(self, count: int) -> None:
        for rank in range(len(self.workers)):
            for _ in range(count):
                self.step(rank)

    def restart(self, size: int) -> None:
        """All end, and as many others take up their checkpoint."""
        states = [worker.loop.shard.state_dict() for worker in self.workers]
        self.workers = [self._worker(rank, size) for rank in range(size)]
        for rank, worker in enumerate(self.workers):
            worker.loop.shard.load_state_dict(taken_up(states, rank, size))

    def resume(self, rank: int) -> None:
        """From now on this worker is compared with one that was started anew from its state."""
        loop = self.workers[rank].loop
        copy = self._make(rank, len(self.workers))
        copy.load_state_dict(loop.shard.state_dict())
        self.workers[rank].copies.append(Looping(copy, self._read))

    def change(self, stayed: Sequence[int], newcomers: int, unused: int = 0, silent: bool = False) -> None:
        """unused: how many of its last samples each lost worker had drawn and not used, of those since the last change,
        in the epoch it was in. silent: the lost have told nothing of their positions."""
        positions = [worker.loop.shard.state_dict() for worker in self.workers]
        size = len(stayed) + newcomers
        for rank in {*range(len(self.workers))} - {*stayed}:
            self._lose(rank, positions, unused)
        last = max(worker.loop.shard.epoch for worker in self.workers)
        for epoch in range(last + 1):
            left = [rank for rank in range(len(self.workers)) if not self._is_over(rank, positions[rank], epoch)]
            if left and not {*left} & {*stayed}:
                self.given_up.add(epoch)
        self.workers = [
            *(self.workers[old] for old in stayed),
            *(self._worker(len(stayed) + new, size) for new in range(newcomers)),
        ]
        known = [None if silent and old not in stayed else each for old, each in enumerate(positions)]
        for rank, worker in enumerate(self.workers):
            worker.used.clear()
            for loop in (worker.loop, *worker.copies):
                loop.shard.regroup(known, Regrouping(rank, size, stayed))

    def share(self, widths: Sequence[int]) -> None:
        """The same workers divide the rest in proportion to `widths`, by rank."""
        size = len(self.workers)
        positions = [worker.loop.shard.state_dict() for worker in self.workers]
        for rank, worker in enumerate(self.workers):
            worker.used.clear()
            for loop in (worker.loop, *worker.copies):
                loop.shard.regroup(positions, Regrouping(rank, size, range(size), widths))

    def _is_over(self, rank: int, state: State, epoch: int) -> bool:
        return Position.of(state, total=self._total, rank=rank, size=len(self.workers)).is_over(epoch)

    def _lose(self, rank: int, positions: list[dict[str, Any]], unused: int) -> None:
        worker, position = self.workers[rank], positions[rank]
        last = [sample for epoch, samples in worker.used if epoch == position["epoch"] for sample in samples]
        unused = min(unused, len(last), position["drawn"])
        self.used.setdefault(position["epoch"], Counter()).subtract(last[len(last) - unused :])
        position["drawn"] -= unused

    def check(self) -> None:
        """Bring every epoch that was begun to its end, and count."""
        last = max(worker.loop.shard.epoch for worker in self.workers)
        for rank, worker in enumerate(self.workers):
            while worker.loop.shard.epoch <= last:
                self.step(rank)
        for epoch in range(last + 1):
            used = +self.used.get(epoch, Counter())
            assert set(used) <= set(range(self._total))
            assert not [sample for sample, count in used.items() if count > 1], f"used twice in epoch {epoch}"
            if epoch not in self.given_up:
                assert len(used) == self._total, f"left out in epoch {epoch}: {set(range(self._total)) - set(used)}"

    def check_alike(self) -> None:
        """All of an epoch tell the same deals, and its places are of one worker each."""
        for epoch in {worker.loop.shard.epoch for worker in self.workers}:
            deals = [worker.loop.shard._at.deal for worker in self.workers if worker.loop.shard.epoch == epoch]
            assert len({(deal.total, deal.places, deal.drawn) for deal in deals}) == 1
            places = [deal.place for deal in deals if deal.place >= 0]
            assert len({*places}) == len(places)
