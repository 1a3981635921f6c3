"""World state: this worker's rank among all workers, and its shards of the data; gossamer.World is its public view."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

import torch
from torch.utils.data import IterableDataset

from gossamer import events
from gossamer.base.transport import Transport
from gossamer.comm import environment
from gossamer.comm.elastic.joined_run import is_elastic, join_run
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
        """The state that the shards belong to."""

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
        """This rank's part of `dataset`. Of a map-style one, or a sampler, as a sampler for a DataLoader: DataLoader(
        dataset, sampler=world.shard(dataset)). Of an iterable one as one: DataLoader(world.shard(stream)).

        shuffle False: in the dataset's order in every epoch, as an evaluation reads it; a sampler has its own order.
        stratify: one label a sample, equally frequent on all ranks. non_iid, with `labels`: unequally frequent, by a
        Dirichlet distribution of this concentration: 100 is nearly equal, 0.1 leaves most ranks few labels.
        Streams are in their own order and know neither. even: how all ranks get equally many of their items, "drop" or
        "pad"; see StreamShard, and HubStreamShard for those of Hugging Face.
        """
        state = self._state
        rank, size = state._place
        if not isinstance(dataset, IterableDataset):
            if even is not None:
                raise ValueError(
                    f"even={even!r} is for streams, and this dataset has a length: ranks differ by one sample at most. "
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
                "a stream is dealt out as it comes, so how often a label comes to a rank cannot be chosen. Write "
                "world.shard(stream), or give a map-style dataset."
            )
        if not is_hub_stream(dataset):
            return state.keep(StreamShard(dataset, rank=rank, size=size, even=even))
        if even is not None or is_elastic():
            reason = f"even={even!r} cannot be kept" if even is not None else "workers cannot come and go"
            raise ValueError(
                "ranks read whole shards of a Hugging Face stream, and how many examples are in each, or left, is not "
                f"known, so {reason}. Give world.shard a torch.utils.data.IterableDataset of your own, whose __iter__ "
                "yields from the dataset: its items are counted."
            )
        return state.keep(HubStreamShard(dataset, rank=rank, size=size))


class WorldState(ShardFactory):
    """This worker's place among all workers, and the positions of its shards, as a session moves them."""

    def __init__(self, *, rank: int, size: int, local_rank: int, device: torch.device, joins: bool = False) -> None:
        """joins: this worker is a newcomer to a run, which is given its place at gossamer.attach."""
        self._joins = joins
        self._place = (rank, size)  # one reference: another thread than the one that trains may move it
        self._local_rank, self._device = local_rank, device
        self._shards: list[weakref.ref[WorldShard]] = []
        self._marks = EpochMarks()
        self._told = False  # of a loader that draws ahead, once

    def __repr__(self) -> str:
        return f"WorldState(rank={self.rank}, size={self.size}, local_rank={self.local_rank}, device={self.device!r})"

    @property
    def rank(self) -> int:
        """This worker's number among all, from 0; another where workers came or went."""
        return self._place[0]

    @property
    def size(self) -> int:
        """How many workers there are now; before gossamer.attach, with how many the run began."""
        return self._place[1]

    @property
    def local_rank(self) -> int:
        """This worker's number among those that were started on its machine."""
        return self._local_rank

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return self._device

    @property
    def is_first(self) -> bool:
        """True on rank 0 only: the worker that prints and writes."""
        return self.rank == 0 and not self._joins

    @property
    def _state(self) -> WorldState:
        return self

    def within(self, mesh: MeshDimension) -> WorldState:
        """This worker's place within one dimension of a DeviceMesh; checkpoints hold its shards with this world's."""
        world = WorldState(rank=mesh.get_local_rank(), size=mesh.size(), local_rank=self.local_rank, device=self.device)
        world._shards, world._marks = self._shards, self._marks
        return world

    def own_transport(self) -> Transport | None:
        """A new group's transport, where this world needs nothing of the environment for it. Every rank asks at the
        same place."""
        return SimulatedGroup(1).transports[0] if self.size == 1 else None

    def keep(self, shard: _Dealt) -> _Dealt:
        """Save the position of this shard with those made before, and move it when workers come or go."""
        self._shards.append(weakref.ref(shard))
        self._marks.add(shard)
        return shard

    def _alive(self) -> list[WorldShard]:
        # Weak references, so that shards made for one evaluation and dropped do not count.
        return [shard for reference in self._shards if (shard := reference()) is not None]

    def state_dict(self) -> dict[str, Any]:
        """The positions of the shards in use, in the order they were made. Draws outside of session.epoch() that
        nothing was trained on do not count."""
        shards = self._alive()
        self._tell_of_fetching(shards, "a checkpoint counts as trained on what was only fetched: the resumed run would")
        return {"shards": self._marks.states(shards)}

    def _tell_of_fetching(self, shards: Sequence[WorldShard], consequence: str) -> None:
        if self.is_first and not self._told and any(shard.drawn_ahead and not shard.tracked for shard in shards):
            self._told = True
            events.notice(
                f"a DataLoader with workers fetches ahead, and {consequence} skip it, or draw a stream from its "
                "beginning. Let the session count what the loop takes: loader = session.track(DataLoader(...))"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the shards in use go on where the saved ones stood."""
        for shard, position in self._matched(state["shards"], "The checkpoint holds"):
            shard.load_state_dict(position)
        self._marks.set(self._alive())

    # -- epochs that all ranks agree on --------------------------------------------------------------------------------

    def watch(self, progress: Callable[[], object]) -> None:
        """A session is attached. progress: returns another value after each of its steps."""
        self._marks.watch(progress)

    def enter_epoch(self) -> None:
        """session.epoch() begins: draws since the last one count only if they were trained on."""
        self._marks.enter(self._alive())

    def entered_epochs(self) -> list[int]:
        """For each shard in use the newest epoch of which this rank has drawn, or -1."""
        return [shard.entered for shard in self._alive()]

    def leave_epoch(self, entered: Sequence[Sequence[int]]) -> None:
        """session.epoch() ends. entered: entered_epochs() of all ranks that were compared."""
        shards = self._alive()
        if all(len(each) == len(shards) for each in entered):
            for shard, epochs in zip(shards, zip(*entered, strict=True), strict=False):
                shard.finish_through(max(epochs))
        self._marks.leave(shards)

    @property
    def lap(self) -> int:
        """The position of this rank, in half epochs of the first shard that is shuffled; 0 without one."""
        return next((lap for shard in self._alive() if (lap := shard.lap) is not None), 0)

    # -- workers that come and go --------------------------------------------------------------------------------------

    def note_trained(self) -> None:
        """A step was made together: what was drawn up to now is trained on."""
        for shard in self._alive():
            shard.note_trained()

    def positions(self) -> list[dict[str, Any]]:
        """Where the shards in use stand, in the order they were made, for `move` on this worker and on the others."""
        return [shard.position() for shard in self._alive()]

    def move(
        self,
        rank: int,
        size: int,
        positions: Sequence[Sequence[Mapping[str, Any] | None]],
        *,
        stayed: Sequence[int] = (),
    ) -> None:
        """Workers came or went: be `rank` of `size` from now on, and share what is left of every shard's epoch.

        positions: for each shard in use, in the order they were made, its position on each worker before, by rank, None
        where it is not known; see Shard.regroup, also for `stayed`. Raises CheckpointError where they cannot be
        matched.
        """
        matched = self._matched(positions, "The other workers hold")
        self._marks.rewind(self._alive())
        for shard, states in matched:
            shard.regroup(rank, size, states, stayed=stayed)
        self._marks.set(self._alive())
        self._place, self._joins = (rank, size), False
        shards = [shard for shard, _ in matched]
        self._tell_of_fetching(shards, "what a lost worker had only fetched counts as trained on: those who go on")

    def _matched(self, saved: Sequence[_Saved], who_holds: str) -> list[tuple[WorldShard, _Saved]]:
        shards = self._alive()
        if len(saved) != len(shards):
            raise CheckpointError(
                f"{who_holds} the positions of {len(saved)} shards and this run has {len(shards)}, "
                "so they cannot be matched. Make the same calls of world.shard, in the same order, before "
                "loading, and before gossamer.attach."
            )
        return list(zip(shards, saved, strict=True))


_states: weakref.WeakKeyDictionary[WorkerScope, WorldState] = weakref.WeakKeyDictionary()


def current() -> WorldState:
    """The state of this worker; it joins the job that the environment describes with the first call."""
    worker = current_worker()
    if worker not in _states:
        uncaught_errors.install()
        _states[worker] = _elastic_world() if is_elastic() else _launched_world()
    return _states[worker]


def place(state: WorldState) -> None:
    """Use `state` for this worker, whatever the environment describes: it is simulated."""
    _states[current_worker()] = state


def _launched_world() -> WorldState:
    job = environment.here()
    if job.world > 1:
        environment.join(job)
    events.emit(events.Joined())
    return WorldState(rank=job.rank, size=job.world, local_rank=job.local_rank, device=environment.device_for(job))


def _elastic_world() -> WorldState:
    run = join_run()
    events.emit(events.Joined())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = environment.device_for(environment.JobEnvironment(local_rank=local_rank))
    return WorldState(rank=run.rank, size=run.size, local_rank=local_rank, device=device, joins=run.joins)
