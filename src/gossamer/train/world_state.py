"""World state: this worker's rank among all workers, and its shards of the data; gossamer.World is its public view."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, Protocol, TypeVar, overload

import torch
from torch.utils.data import IterableDataset

from gossamer import events
from gossamer.base.transport import Transport
from gossamer.comm import environment
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.comm.runtime import uncaught_errors
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import CheckpointError
from gossamer.train.sampler import (
    EpochMarks,
    Even,
    HubStreamShard,
    Labels,
    Shard,
    StreamShard,
    WorldShard,
    is_hub_stream,
)
from gossamer.train.sampler.position import Regrouping, State

_Saved = TypeVar("_Saved")
_Item = TypeVar("_Item")
_Dealt = TypeVar("_Dealt", bound=WorldShard)


class MeshDimension(Protocol):
    """One dimension of torch.distributed.device_mesh.DeviceMesh: mesh["replicate"]."""

    def get_local_rank(self) -> int: ...
    def size(self) -> int: ...


class ShardFactory(ABC):
    """Makes the shards of one worker."""

    __slots__ = ()

    @property
    @abstractmethod
    def _state(self) -> WorldState:
        """The state of the shards' worker."""

    @overload
    def shard(self, dataset: IterableDataset[_Item], *, even: Even | None = None) -> StreamShard[_Item]: ...  # type: ignore[overload-overlap]

    @overload
    def shard(
        self,
        dataset: object,
        stratify: Labels | None = None,
        seed: int = 0,
        *,
        shuffle: bool = True,
        labels: Labels | None = None,
        non_iid: float | None = None,
    ) -> Shard: ...

    def shard(
        self,
        dataset: Any,
        stratify: Labels | None = None,
        seed: int = 0,
        *,
        shuffle: bool = True,
        labels: Labels | None = None,
        non_iid: float | None = None,
        even: Even | None = None,
    ) -> Shard | StreamShard[Any] | HubStreamShard:
        """This rank's part of `dataset`: disjoint from those of other ranks, together covering it.

        Example:
            loader = DataLoader(dataset, sampler=world.shard(dataset))
            loader = DataLoader(world.shard(stream))

        Args:
            dataset: a map-style dataset or a sampler; the result is a sampler. Or an iterable dataset; the result is
                an iterable dataset.
            stratify: one label per sample, equally frequent on all ranks.
            seed: of the shuffle.
            shuffle: False keeps the dataset's order in every epoch, as for an evaluation; a sampler has its own order.
            labels: one label per sample, for `non_iid`.
            non_iid: concentration of a Dirichlet distribution of label frequencies by rank, above 0: 100 is nearly
                equal, 0.1 leaves most ranks few labels.
            even: for streams: "drop" or "pad" give all ranks the same number of items; see StreamShard, and
                HubStreamShard for those of Hugging Face.

        Raises:
            ValueError: arguments that contradict each other or this kind of dataset.
            TypeError: `dataset` is a DataLoader, or has no length.
        """
        state = self._state
        rank, size = state._place
        if not isinstance(dataset, IterableDataset):
            if even is not None:
                raise ValueError(
                    f"even={even!r} is for streams, but this dataset has a length: ranks differ by one sample at most. "
                    "Write DataLoader(..., sampler=world.shard(dataset), drop_last=True)."
                )
            return state.keep(
                Shard(
                    dataset,
                    rank=rank,
                    size=size,
                    stratify=stratify,
                    seed=seed,
                    shuffle=shuffle,
                    labels=labels,
                    non_iid=non_iid,
                )
            )
        if stratify is not None or labels is not None or non_iid is not None:
            raise ValueError(
                "a stream is divided while it is read, so label frequencies cannot be chosen. Write "
                "world.shard(stream), or pass a map-style dataset."
            )
        if not is_hub_stream(dataset):
            return state.keep(StreamShard(dataset, rank=rank, size=size, even=even))
        if even is not None or is_elastic():
            reason = f"even={even!r} cannot be kept" if even is not None else "workers cannot join or leave"
            raise ValueError(
                "ranks read whole shards of a Hugging Face stream, and the number of examples in them is not known, so "
                f"{reason}. Pass world.shard a torch.utils.data.IterableDataset with an __iter__ that yields from the "
                "dataset: its items are counted."
            )
        return state.keep(HubStreamShard(dataset, rank=rank, size=size))


class WorldState(ShardFactory):
    """This worker's place among all workers, and the positions of its shards, which a session updates."""

    def __init__(self, *, rank: int, size: int, local_rank: int, device: torch.device, joins: bool = False) -> None:
        """joins: whether this worker joins a run, which assigns its place at gossamer.attach."""
        self._joins = joins
        self._place = (rank, size)  # one reference, since another thread than the training thread may replace it
        self._local_rank, self._device = local_rank, device
        self._shards: list[weakref.ref[WorldShard]] = []
        # Shards of earlier sessions, with their states. Ranks discard them at different times
        self._earlier: weakref.WeakKeyDictionary[WorldShard, State] = weakref.WeakKeyDictionary()
        self._marks = EpochMarks()
        self._noticed = False  # whether the notice about a loader that draws ahead was given
        self._equal_parts_reported = False

    def __repr__(self) -> str:
        return f"WorldState(rank={self.rank}, size={self.size}, local_rank={self.local_rank}, device={self.device!r})"

    @property
    def rank(self) -> int:
        """This worker's rank among all workers, from 0; it may change when workers join or leave."""
        return self._place[0]

    @property
    def size(self) -> int:
        """Current number of workers; before gossamer.attach, the number at the start of the run."""
        return self._place[1]

    @property
    def local_rank(self) -> int:
        """This worker's rank among those started on its machine."""
        return self._local_rank

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._device

    @property
    def is_first(self) -> bool:
        """True on rank 0 only, the worker that should print and write."""
        return self.rank == 0 and not self._joins

    @property
    def _state(self) -> WorldState:
        return self

    def within(self, mesh: MeshDimension) -> WorldState:
        """This worker's place within one dimension of a DeviceMesh; its shards are in this world's checkpoints."""
        world = WorldState(rank=mesh.get_local_rank(), size=mesh.size(), local_rank=self.local_rank, device=self.device)
        world._shards, world._marks = self._shards, self._marks
        return world

    def own_transport(self) -> Transport | None:
        """A transport for a new group, if this world needs none from the environment. Called on every rank at the same
        place."""
        return SimulatedGroup(1).transports[0] if self.size == 1 else None

    def keep(self, shard: _Dealt) -> _Dealt:
        """Register a shard, so that its position is saved, and updated when workers join or leave."""
        self._shards.append(weakref.ref(shard))
        self._marks.add(shard)
        return shard

    def _alive(self) -> list[WorldShard]:
        # Weak references, so that shards made for one evaluation and dropped are not counted.
        return [shard for reference in self._shards if (shard := reference()) is not None]

    def _current(self) -> list[WorldShard]:
        """Shards in use that no earlier session has drawn from, or this one has, too."""
        return [shard for shard in self._alive() if not self._is_earlier(shard)]

    def _is_earlier(self, shard: WorldShard) -> bool:
        return shard in self._earlier and self._earlier[shard] == shard.state_dict()

    def data(self) -> list[str]:
        """For each map-style shard in use, in the order of creation, a text that is equal on ranks with its data."""
        return [shard.data for shard in self._current() if isinstance(shard, Shard)]

    def state_dict(self) -> dict[str, Any]:
        """The positions of the shards in use, in the order of their creation. Draws outside of session.epoch() that
        were not trained on are not counted."""
        shards = self._alive()
        self._notice_prefetching(shards, "a checkpoint counts prefetched samples as trained on: the resumed run would")
        return {"shards": self._marks.states(shards)}

    def _notice_prefetching(self, shards: Sequence[WorldShard], consequence: str) -> None:
        if self.is_first and not self._noticed and any(shard.drawn_ahead and not shard.tracked for shard in shards):
            self._noticed = True
            events.notice(
                f"a DataLoader with workers fetches ahead, and {consequence} skip them, or draw a stream from its "
                "beginning. Let the session count the samples that the loop takes: loader = "
                "session.track(DataLoader(...))"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of the shards in use."""
        for shard, position in self._matched(state["shards"], "The checkpoint holds"):
            shard.load_state_dict(position)
        self._marks.set(self._alive())

    # -- epochs that all ranks agree on --------------------------------------------------------------------------------

    def watch(self, progress: Callable[[], object]) -> None:
        """Register an attached session. progress: returns a value that changes with each of its steps."""
        self._marks.watch(progress)

    def enter_epoch(self) -> None:
        """Called when session.epoch() begins: draws since the last block count only if they were trained on."""
        self._marks.enter(self._current())

    def entered_epochs(self) -> list[int]:
        """The newest epoch with draws of this rank for each shard in use, or -1."""
        return [shard.entered for shard in self._current()]

    def leave_epoch(self, entered: Sequence[Sequence[int]]) -> None:
        """Called when session.epoch() ends. entered: entered_epochs() of all compared ranks."""
        shards = self._current()
        if all(len(each) == len(shards) for each in entered):
            for shard, epochs in zip(shards, zip(*entered, strict=True), strict=False):
                shard.finish_through(max(epochs))
        self._marks.leave(shards)

    def begin_training(self) -> None:
        """A session begins. Shards that were trained on belong to an earlier one until they are drawn from again."""
        trained = self._marks.trained
        self._earlier = weakref.WeakKeyDictionary(
            {shard: state for shard in self._alive() if (state := trained(shard)) is not None}
        )

    @property
    def lap(self) -> int:
        """The position of this rank, in half epochs of the first shuffled shard drawn from in this session; 0 without
        one."""
        return next((lap for shard in self._current() if (lap := shard.lap) is not None), 0)

    # -- changes of the workers ----------------------------------------------------------------------------------------

    def note_trained(self) -> None:
        """Record that all workers have trained on the samples drawn so far."""
        for shard in self._alive():
            shard.note_trained()

    def move(
        self,
        rank: int,
        size: int,
        positions: Sequence[Sequence[Mapping[str, Any] | None]],
        *,
        stayed: Sequence[int] = (),
    ) -> None:
        """Become `rank` of `size` after a change of the workers, and divide the rest of every shard's epoch again.

        Args:
            positions: for each shard in use, in the order of their creation, its position on each worker before the
                change, by rank, or None; see Shard.regroup.
            stayed: see Regrouping.

        Raises:
            CheckpointError: the positions do not match the shards.
        """
        matched = self._matched(positions, "The other workers hold")
        self._marks.rewind(self._alive())
        for shard, states in matched:
            shard.regroup(states, Regrouping(rank, size, stayed))
        self._marks.set(self._alive(), moved=True)
        self._place, self._joins = (rank, size), False
        shards = [shard for shard, _ in matched]
        self._notice_prefetching(shards, "samples that a lost worker had only fetched count as trained on: others")

    def renumber(self, rank: int, size: int) -> None:
        """Become `rank` of `size`, without lock step: shards keep their parts of the data."""
        self._place, self._joins = (rank, size), False

    # -- workers with unequal speeds -----------------------------------------------------------------------------------

    def parts_in_use(self, rank: int, size: int) -> list[Any]:
        """For each shard in use, in the order of creation: whether this session.epoch() block has drawn from it, and
        its position, if the parts of `size` workers may be unequal. Plain values for JSON."""
        shards = self._alive()
        positions = [shard.state_dict() if shard.follows_speed(rank, size) else None for shard in shards]
        return [[self._marks.drawn(shard), each] for shard, each in zip(shards, positions, strict=True)]

    def divide(self, shares: Sequence[int], parts: Sequence[Sequence[Any]], rank: int) -> None:
        """Divide the rest of the epoch, and later epochs, in proportion to `shares` of the workers, by rank.

        Shards with equal parts from which no rank has drawn in this session.epoch() block keep them, such as those of
        an evaluation: loops over them may need equally many batches.

        Args:
            parts: parts_in_use() of all workers, by rank.
        """
        shards = self._alive()
        if {len(each) for each in parts} != {len(shards)}:
            self._report_equal_parts("ranks made different numbers of calls of world.shard")
            return
        common = gcd(*shares)
        widths = [share // common for share in shares] if len({*shares}) > 1 else []
        change = Regrouping(rank, len(shares), range(len(shares)), widths)
        for shard, held in zip(shards, zip(*parts, strict=True), strict=True):
            drawn, positions = zip(*held, strict=True)
            if None not in positions and (any(drawn) or "widths" in positions[0]):
                shard.regroup(positions, change)
            elif any(drawn):
                self._report_equal_parts("stratify, non_iid and Hugging Face streams need them")

    def _report_equal_parts(self, reason: str) -> None:
        if self.is_first and not self._equal_parts_reported:
            self._equal_parts_reported = True
            events.notice(
                f"the parts of an epoch stay equal although the workers' speeds differ, because {reason}. The slowest "
                "worker ends each epoch last. Write DataLoader(..., sampler=world.shard(dataset)), on every rank"
            )

    def _matched(self, saved: Sequence[_Saved], holder: str) -> list[tuple[WorldShard, _Saved]]:
        shards = self._alive()
        if len(saved) != len(shards):
            raise CheckpointError(
                f"{holder} the positions of {len(saved)} shards, but this run has {len(shards)}. Make the same "
                "calls of world.shard, in the same order, before loading, and before gossamer.attach."
            )
        return list(zip(shards, saved, strict=True))


_states: weakref.WeakKeyDictionary[WorkerScope, WorldState] = weakref.WeakKeyDictionary()


def current() -> WorldState:
    """The state of this worker. The first call joins the job that the environment describes."""
    worker = current_worker()
    if worker not in _states:
        uncaught_errors.install()
        _states[worker] = _elastic_world() if is_elastic() else _launched_world()
    return _states[worker]


def place(state: WorldState) -> None:
    """Use `state` for this worker in place of the environment: it is simulated."""
    _states[current_worker()] = state


SPAWNED_ALONE = (
    "this process was started by multiprocessing, as torch.multiprocessing.spawn does, and no launcher has given it a "
    "rank, so it trains alone, as a world of one. Start the workers by `gossamer run --workers 4 train.py`, whose "
    "script calls the training function once, without spawn; or write gossamer.launch(train, workers=4) in place of "
    "spawn(train, nprocs=4)"
)


def _launched_world() -> WorldState:
    job = environment.here()
    if job.world > 1:
        environment.join(job)
    elif environment.is_spawned_alone(job):
        events.notice(SPAWNED_ALONE)
    events.emit(events.Joined())
    return WorldState(rank=job.rank, size=job.world, local_rank=job.local_rank, device=environment.device_for(job))


def _elastic_world() -> WorldState:
    from gossamer.comm.elastic.joined_run import join_run  # most runs are not elastic, and start sooner

    run = join_run()
    events.emit(events.Joined())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = environment.device_for(environment.JobEnvironment(local_rank=local_rank))
    return WorldState(rank=run.rank, size=run.size, local_rank=local_rank, device=device, joins=run.joins)
