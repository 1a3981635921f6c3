"""World: the job's workers from the view of a training script, with exact collectives of objects and tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.comm.environment.wait_timeout import set_timeout
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.train.session import world_calls
from gossamer.train.session.world_calls import Reduction
from gossamer.train.world_state import MeshDimension, ShardFactory, WorldState, current

_Value = TypeVar("_Value")


class World(ShardFactory):
    """The workers of this job, and this worker's rank among them; a world of one without a launcher. Made by
    gossamer.init.

    Every rank must make the same collective calls (barrier, broadcast, all_gather, all_reduce) in the same order. They
    run with or without an attached session, also while workers join or leave an elastic run, and then include the
    current workers. Values are sent as JSON and as bytes of tensors, without pickle: numbers, text, None, bytes,
    tensors, NumPy arrays, and lists, tuples and dicts with text keys of them. Other types raise TypeError. All of them
    raise MismatchError if ranks made different calls, and PeerLost if a worker was lost that the recipe needs.

    Example:
        >>> world = gossamer.init()
        >>> world.rank, world.size, world.is_first
        (0, 1, True)
    """

    __slots__ = ("__weakref__", "_internal")

    def __init__(self, state: WorldState) -> None:
        self._internal = state

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, local_rank={self.local_rank}, device={self.device!r})"

    @property
    def _state(self) -> WorldState:
        return self._internal

    @property
    def rank(self) -> int:
        """This worker's number among all, from 0; it changes when workers of an elastic run join or leave."""
        return self._state.rank

    @property
    def size(self) -> int:
        """The current number of workers; before gossamer.attach, the number at the start of the run."""
        return self._state.size

    @property
    def local_rank(self) -> int:
        """This worker's number among those that were started on its machine."""
        return self._state.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._state.device

    @property
    def is_first(self) -> bool:
        """True on rank 0 only: the worker that prints and writes."""
        return self._state.is_first

    def within(self, mesh: MeshDimension) -> World:
        """Return this worker's world within one dimension of a DeviceMesh, to shard data.

        All ranks of a replica then draw the same samples, as tensor parallelism and pipelines need. Checkpoints contain
        these shards with this world's. Collectives must be called on the world of all workers, not on this one.

        Args:
            mesh: one dimension of a DeviceMesh.

        Example:
            shard = world.within(mesh["replicate"]).shard(dataset)
        """
        return World(self._state.within(mesh))

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the shards in use, in the order they were made; session.save writes them.

        Example:
            >>> world = gossamer.init()
            >>> world.load_state_dict(world.state_dict())
        """
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the shards in use from the saved positions; session.load does it.

        Args:
            state: the result of `state_dict` on this rank.
        """
        self._state.load_state_dict(state)

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Return when every worker has called it.

        Args:
            timeout: time to wait for the other workers, such as timedelta(minutes=5); default: that of gossamer.init.

        Raises:
            PeerLost: A worker was lost, or some did not call it in time. After a timeout this worker's next calls wait
                until the late workers have called it.

        Example:
            >>> gossamer.init().barrier()
        """
        world_calls.barrier(self._state, timeout)

    def broadcast(self, value: _Value, root: int = 0) -> _Value:
        """Return the `value` of rank `root` on every rank; other ranks may pass None.

        Tensors are returned as copies: on the CPU if they were there on `root`, else on this worker's device.

        Args:
            value: numbers, text, bytes, tensors, arrays, or containers of these.
            root: the rank that sends.

        Raises:
            ValueError: `root` is not a rank.

        Example:
            >>> gossamer.init().broadcast({"learning_rate": 0.1, "layers": [3, 4]})
            {'learning_rate': 0.1, 'layers': [3, 4]}
        """
        return world_calls.broadcast(self._state, value, root)  # type: ignore[no-any-return]

    def all_gather(self, value: _Value) -> list[_Value]:
        """Return the `value` of every worker, by rank. Types and shapes may differ between ranks.

        Tensors are returned as copies, as from `broadcast`. gossamer.gather requires equal names, shapes and dtypes.

        Args:
            value: numbers, text, bytes, tensors, arrays, or containers of these.

        Example:
            >>> gossamer.init().all_gather({"seen": 128})
            [{'seen': 128}]
        """
        return world_calls.all_gather(self._state, value)

    @overload
    def all_reduce(self, value: float, op: Reduction = "mean") -> float: ...
    @overload
    def all_reduce(self, value: Tensor, op: Reduction = "mean") -> Tensor: ...
    @overload
    def all_reduce(self, value: NDArray[Any], op: Reduction = "mean") -> NDArray[Any]: ...
    def all_reduce(self, value: Any, op: Reduction = "mean") -> Any:
        """The sum, mean, minimum or maximum over all workers, elementwise: a new value, with equal bits on every rank.

        Sums and means are computed in float64 in the order of ranks and rounded once; those of integers are exact. No
        compressor is applied. Each worker sends about 2 * nbytes, whatever their number; a tensor on a GPU goes through
        this machine's memory.

        Args:
            value: A tensor, a NumPy array or a number, with the same shape and dtype on every rank. Its dtype is kept,
                except: sums of integers and bools are int64, means of them are of the default dtype (float64 for
                arrays), means of numbers are floats.
            op: "mean", "sum", "min" or "max".

        Raises:
            ValueError: `op` is not one of these.
            TypeError: a sparse tensor, the minimum or maximum of a complex or uint64 one, or a container.

        Example:
            >>> gossamer.init().all_reduce(3, "sum")
            3
        """
        return world_calls.all_reduce(self._state, value, op)


_worlds: WeakKeyDictionary[WorkerScope, World] = WeakKeyDictionary()


def init(timeout: timedelta | None = None) -> World:
    """Join the job described by the environment; without a launcher, a world of one. Later calls return the same world.

    The ranks of missing workers are printed every ten seconds.

    Args:
        timeout: time to wait for the other workers, here, in gossamer.attach and in every step, such as
            timedelta(minutes=45). It overrides GOSSAMER_TIMEOUT, in seconds; the default is 30 minutes.

    Raises:
        ConnectError: Workers did not join in time. Raised within seconds for errors that waiting cannot fix: a worker
            failed, belongs to another run, or cannot be reached by another.

    Example:
        >>> world = gossamer.init()
        >>> world.size
        1
    """
    if timeout is not None:
        set_timeout(timeout)
    state, worker = current(), current_worker()
    if worker not in _worlds or _worlds[worker]._state is not state:
        _worlds[worker] = World(state)
    return _worlds[worker]
