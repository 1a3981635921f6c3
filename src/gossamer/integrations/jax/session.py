"""JAX sessions: train the arrays of a pytree together with other workers, between two jitted functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import jax
import torch
from torch import Tensor

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.layout import dtype_of
from gossamer.base.runner import broadcast
from gossamer.base.transport import Transport
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import AttachError
from gossamer.integrations.jax.leaves import Leaves, Taken, part_name
from gossamer.train.session.arrays import ArraySession
from gossamer.train.session.group_changes import WorldChange
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.session_status import SessionStats
from gossamer.train.sharding.model_group import ModelGroup
from gossamer.train.world_state import WorldState, current


class PytreeSession:
    """Trains the pytree `parameters` together with the other workers, by `recipe`.

    Trees come back with the structure, shardings and dtypes that were given. Other leaves than arrays of floating-point
    numbers (integers, random keys, functions, None) are returned unchanged. Arrays on CPUs are read in place, and the
    results are copied once; arrays of other devices are copied through host memory. A sharded array is averaged by
    shard, and compressors treat each shard as a separate tensor.

    Args:
        parameters: a tree of the same structure on every rank; `session.parameters` then has rank 0's values.
        recipe: as for gossamer.attach; GOSSAMER_RECIPE overrides it.
        state: a function that returns the loop's other arrays as a tree, such as the current state of an optax
            optimizer. Checkpoints include it, and a worker that joins an elastic run receives it: `session.state`.
        transport, options: as for gossamer.engine.Session.

    Raises:
        AttachError: for unsupported trees and recipes.
        MismatchError: if trees, recipes or options differ between ranks.

    Example:
        session = gossamer.jax.Session(parameters, "TopK(0.01)")
        mean = session.give(gradient(parameters, batch))  # a jitted function
        if mean is not None:
            parameters, moments = update(parameters, moments, mean)  # jitted
        parameters = session.took_step(parameters)
    """

    def __init__(
        self,
        parameters: Any,
        recipe: Written = None,
        transport: Transport | None = None,
        *,
        state: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        world = current()
        rank = world.rank if transport is None else transport.rank
        self._leaves = Leaves(parameters, rank)
        taken = self._leaves.take(parameters, "parameter")
        options = {"framework": f"JAX {jax.__version__}", **options}
        slices = replicas(world) if transport is None else None
        if state is not None:
            leaves, read_state = Leaves(state(), rank, every=True), state
            self._state_leaves, self._latest_state = leaves, leaves.take(state(), "state").released()
            options["state"] = lambda: leaves.take(read_state(), "state").tensors
        self._has_state = state is not None
        self.arrays = ArraySession(taken.tensors, recipe, transport, replicas=slices, **options)
        self._shared = SharedParts(self._leaves, self.arrays.part_group)
        self._rank, self._latest = rank, taken.released()

    def __repr__(self) -> str:
        return repr(self.arrays)

    # -- in the loop -----------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """The recipe, with all defaults that depend on the number of workers filled in."""
        return self.arrays.recipe

    @property
    def steps(self) -> int:
        """Steps so far: committed exchanges, or under local training the steps of this worker."""
        return self.arrays.steps

    @property
    def stats(self) -> SessionStats:
        """Bytes, seconds and compression ratio of the last step and of all steps, on this worker."""
        return self.arrays.stats

    @property
    def accumulating(self) -> bool:
        """Whether more gradients are needed before a step, as under EveryStep(accumulate=4)."""
        return self.arrays.accumulating

    @property
    def parameters(self) -> Any:
        """The current parameters of this worker."""
        return self._back(self._latest, self.arrays.parameters)

    @property
    def state(self) -> Any:
        """The tree of `state` to continue with. None without `state`.

        After `load_state_dict` it is the checkpoint's; on a worker that joined an elastic run, that of the other
        workers; otherwise the loop's own.
        """
        if not self._has_state:
            return None
        copies = {name: each.clone() for name, each in self.arrays.state.items()}
        return self._state_leaves.back(self._latest_state, copies)

    def on_change(self, callback: Callable[[WorldChange], None]) -> None:
        """Call `callback` for each membership change of an elastic run, after the step in which it happened."""
        self.arrays.on_change(callback)

    def give(self, gradients: Any, weight: float | None = None, *, on_host: bool = False) -> Any:
        """Average the gradients of one backward pass by the recipe; see gossamer.engine.Session.give.

        Args:
            gradients: a tree of the parameters' structure. Leaves that are not averaged may be anything, such as
                float0 of integers.
            weight: this rank's averaging weight, usually its number of samples; persists until given again.
            on_host: return numpy arrays, as callbacks do.

        Returns:
            The averaged gradients; under local training the given ones. None: make no step.

        Raises:
            LayoutError: for another structure, shape or dtype than the parameters'; it names the leaf and the rank.
            LoopError: within jit, for arrays that were donated, and for a second call without `took_step`.
        """
        taken = self._leaves.take(gradients, "gradient")
        mean = self.arrays.give(taken.tensors, weight)
        if mean is None:
            return None
        return self._leaves.on_host(taken, mean) if on_host else self._back(taken, mean)

    def took_step(self, parameters: Any) -> Any:
        """Report the optimizer's step. Call it after each step with the new parameters.

        Returns:
            The parameters to continue with: the given ones, or merged ones if the recipe averages parameters now.

        Raises:
            LayoutError: for another structure, shape or dtype than the parameters'.
            LoopError: within jit, and for arrays that were donated.
        """
        taken = self._leaves.take(parameters, "parameter")
        agreed = self.arrays.took_step(taken.tensors)
        self._latest = taken.released()
        return self._back(taken, agreed)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank: within the block, `give` sends nothing and returns None."""
        with self.arrays.no_sync():
            yield

    def end_epoch(self, state: Any = None) -> tuple[Any, Any]:
        """Wait until every rank is out of data; see gossamer.engine.Session.end_epoch.

        Args:
            state: a tree that is sent along to a rank that missed steps, such as the state of an optax optimizer.

        Returns:
            parameters and state to continue with.
        """
        leaves = Leaves(state, self._rank, every=True)
        taken = leaves.take(state, "state")
        parameters, moved = self.arrays.end_epoch(taken.tensors)
        return self._back(self._latest, parameters), leaves.back(taken.unshared(), moved)

    def averaged_parameters(self) -> Any:
        """The parameters to evaluate and save: under local training the mean or the servers' parameters.

        All ranks call it after the same step.
        """
        return self._back(self._latest, self.arrays.averaged_parameters())

    def log(self, **metrics: float) -> None:
        """Write numbers into the run's record: session.log(loss=0.3)."""
        self.arrays.log(**metrics)

    def request_stop(self) -> None:
        """Request the end of training: `should_stop` becomes true on every rank after the same step."""
        self.arrays.request_stop()

    @property
    def should_stop(self) -> bool:
        """Whether to stop training, true on every rank after the same step: `if session.should_stop: break`."""
        return self.arrays.should_stop

    def _back(self, taken: Taken, tensors: dict[str, Tensor]) -> Any:
        self._shared.settle(tensors)
        return self._leaves.back(taken, tensors)

    # -- saving and ending -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, with torch tensors. Save it with the optimizer's state.

        All ranks call it after the same step.
        """
        return self.arrays.state_dict()

    def load_state_dict(self, *states: dict[str, Any]) -> Any:
        """Resume from `state_dict`; see gossamer.engine.Session.load_state_dict.

        Returns:
            The parameters to continue with.
        """
        return self._back(self._latest, self.arrays.load_state_dict(*states))

    def close(self) -> None:
        """Close the session. All ranks call it. Parameters keep their values."""
        self.arrays.close()

    def __enter__(self) -> Self:
        self.arrays.__enter__()
        return self

    def __exit__(self, *raised: Any) -> bool:
        return self.arrays.__exit__(*raised)


# -- slices: several JAX jobs that train together, each of one or more processes, and each of them one worker ----------

HOW = (
    "jax.distributed.initialize(coordinator_address=..., num_processes=P, process_id=world.rank % P), where the ranks "
    "0 to P-1 are the first slice, P to 2P-1 the second, and so on"
)


def replicas(world: WorldState) -> Sequence[int] | None:
    """The ranks of the run that have this process's place in the other slices; None where a slice is one process.

    Raises AttachError where the run's ranks are not slices of jax.process_count() processes, in order; and for slices
    of several processes in an elastic run.
    """
    processes, place = jax.process_count(), jax.process_index()
    if processes == 1:
        return None
    if is_elastic():
        raise AttachError(
            f"rank {world.rank}: this JAX job has {processes} processes, and workers of an elastic run are single "
            "processes. The loss of one process ends its JAX job, so all processes of the slice would have to leave "
            "the run and return together. Let each slice be one process with all of its devices, or run a fixed "
            f"number: gossamer run --workers {2 * processes} --max-restarts 1."
        )
    if world.size % processes or world.rank % processes != place:
        raise AttachError(
            f"rank {world.rank} of {world.size} is process {place} of {processes} in its JAX job, and slices are ranks "
            f"in a row. Start a multiple of {processes} ranks and write {HOW}."
        )
    return tuple(range(place, world.size, processes))


class SharedParts:
    """Parts of the parameters that several processes of a slice hold. Each averages its copy with the other slices. A
    lossy recipe may round the copies differently, because each process has different other parts. The first process
    that holds a part then sends its copy to the others.
    """

    def __init__(self, leaves: Leaves, group: ModelGroup | None) -> None:
        self._group, self._shared = group, list[tuple[int, str, tuple[int, ...], Any]]()
        if group is None or all(leaf.is_whole for leaf in leaves.trained):
            return  # all processes have the same parts, and compute the same bits
        for leaf in leaves.trained:
            holders: dict[Any, set[int]] = {}
            for device, slices in leaf.sharding.devices_indices_map(leaf.shape).items():
                holders.setdefault(leaf.index(slices), set()).add(device.process_index)
            for index, processes in sorted(holders.items()):
                if len(processes) > 1:
                    shape = tuple(end - first for first, end in index)
                    name = part_name(leaf.name, None if leaf.is_whole else index)
                    self._shared.append((min(processes), name, shape, dtype_of(leaf.dtype.name)))

    def settle(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the shared ones of `tensors` with those of the first process of the slice that holds them."""
        if self._group is None:
            return
        for owner in sorted({owner for owner, *_ in self._shared}):
            remote = [each for each in self._shared if each[0] == owner]
            into = [tensors[name] if name in tensors else torch.empty(s, dtype=d) for _, name, s, d in remote]
            broadcast(self._group.training, into, owner)
