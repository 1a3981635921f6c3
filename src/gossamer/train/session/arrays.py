"""Sessions of arrays: train named arrays of any framework under a recipe, without a model, an optimizer and hooks.

The synchronizers, the reduction and the checkpoints are those of gossamer.attach. Gradients come from `Session.give` in
place of autograd's hooks; parameters come from `Session.took_step` in place of the optimizer's hooks.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import dtype_name, dtype_of
from gossamer.base.transport import Transport
from gossamer.comm.elastic.recognition import elastic, served
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import AttachError, CheckpointError, LayoutError, LoopError
from gossamer.events import RecordOption
from gossamer.train.checkpoint.reshard import agreed
from gossamer.train.engine.arrays import Array, GivenGradients, as_tensor, kind_of, leaf, like
from gossamer.train.engine.frozen_parameters import FrozenParameters
from gossamer.train.engine.loop import JudgedAt, LoopState, StepContext
from gossamer.train.engine.parameter_check import ParameterCheck, Verify, check_verify
from gossamer.train.engine.parameter_views import copy_parameters
from gossamer.train.engine.step_decision import NonFiniteOrigin, settings, unchanged
from gossamer.train.engine.weight_copies import WeightCopies
from gossamer.train.moments.take_over import ownership
from gossamer.train.session import lifecycle_events, session_checkpoint, startup_checks, uneven_inputs
from gossamer.train.session.recipe_choice import Written, chosen_recipe, placed_in, refuse_small_batch
from gossamer.train.session.session_base import SessionBase
from gossamer.train.session.session_status import SessionStats
from gossamer.train.session.transport_setup import begin_reports, model_group, most_workers, transport_for
from gossamer.train.sharding.model_group import ModelGroup
from gossamer.train.sharding.replica_mesh import refuse_apart
from gossamer.train.synchronizers.stages import bucket_fragments
from gossamer.train.traffic.traffic import TrafficEstimate, estimate_traffic
from gossamer.train.world_state import WorldState, current

Arrays = Mapping[str, Array]
NO_STATE = (
    "this worker joined a run, and received its parameters and no state of an optimizer. An optimizer with moments has "
    "other moments here than on the other workers: write engine.Session(parameters, recipe, state=lambda: moments), "
    "then moments = session.state"
)


NEVER_FINITE = (
    "Lower the learning rate, or clip each rank's gradients before they are averaged. A loss that is scaled for "
    "float16, as by a LossScaleOptimizer of Keras, does not find its scale here, because all ranks skip such steps: "
    "train in bfloat16, for instance with keras.config.set_dtype_policy('mixed_bfloat16')."
)


class ArraySession(SessionBase):
    """Trains named arrays together with the other workers.

    In each step of the loop, `give` takes gradients and returns their mean, or None while the recipe accumulates; the
    loop updates its parameters by the mean; `took_step` takes them and returns those to continue with. Every rank
    constructs it with the same names, shapes and dtypes; `session.parameters` are then rank 0's. Arrays may be numpy's,
    torch's or anything with __dlpack__; results are arrays of the kind that was given, in memory of their own.

    Args:
        parameters: arrays by name, flat or of any shape.
        recipe: as for gossamer.attach; GOSSAMER_RECIPE overrides it.
        transport: None for that of `gossamer.init()`, or of a world of one.
        seed: for random choices of the recipe, alike on every rank.
        verify, verify_every, record, log_to: as for gossamer.attach.
        server_optimizer: builds the torch optimizer that parameter servers run, from a list of tensors.
        replicas: ranks of the run that hold the same arrays as this one, where each worker is several processes with
            a part of the parameters each; the recipe runs among these ranks. None: all ranks.
        state: a function that returns the loop's other arrays by name, such as the moments of its optimizer, as they
            are now. Checkpoints hold them, and a newcomer to an elastic run receives them: `session.state`. Under
            recipes that average gradients they must be equal on all workers of an elastic run.
        framework: name of the framework of the arrays, for errors.

    Raises:
        AttachError: for arrays that cannot be served, and recipes that share the work of an optimizer (DGC, OneBitAdam,
            LocalSGD(optimizer_state=...)), which this session does not know; in an elastic run for `replicas`, and for
            recipes that docs/how-to/elastic.md excludes.
        RecipeError: for a recipe that cannot be read.
        MismatchError: where ranks are not alike.

    Example:
        >>> session = gossamer.engine.Session({"weight": torch.zeros(3)}, "TopK(0.5)")
        >>> parameters = session.parameters
        >>> mean = session.give({"weight": torch.ones(3)})
        >>> if mean is not None:
        ...     parameters = {name: parameters[name] - 0.1 * mean[name] for name in parameters}
        >>> parameters = session.took_step(parameters)
        >>> session.close()
    """

    model: None = None  # to the registry of open sessions
    optimizer: None = None

    def __init__(
        self,
        parameters: Arrays,
        recipe: Written = None,
        transport: Transport | None = None,
        *,
        seed: int = 0,
        verify: Verify = "warn",
        verify_every: int | None = None,
        record: RecordOption = None,
        log_to: Iterable[str] = (),
        server_optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
        replicas: Sequence[int] | None = None,
        state: Callable[[], Arrays] | None = None,
        framework: str = "arrays",
    ) -> None:
        check_verify(verify, verify_every)
        self._tensors = {name: leaf(name, array) for name, array in _named(parameters).items()}
        self._kinds = {name: kind_of(array) for name, array in parameters.items()}  # kinds of results
        recorded = ""
        self.part_group: ModelGroup | None = None  # the processes that hold the other parts of this worker's arrays
        if transport is None:
            if replicas is not None:
                _refuse_elastic_replicas()
            self._world = world = current()
            written, size = chosen_recipe(recipe, world), world.size if replicas is None else len(replicas)
            resolved = resolve(written, None if is_elastic() else size)
            refuse_small_batch(resolved, most_workers(size))
            if replicas is not None:
                refuse_apart(resolved)
            transport = transport_for(world, resolved, replicas)
            _refuse_servers(transport)
            self.part_group = None if replicas is None else model_group(replicas, world.size)
            recorded = begin_reports(world, record, log_to)
        else:
            cpu = torch.device("cpu")
            self._world = WorldState(rank=transport.rank, size=transport.world, local_rank=0, device=cpu)
            resolved = resolve(recipe, transport.world if elastic(transport) is None else None)
        super().__init__(placed_in(resolved, transport), transport, seed)
        self._nonfinite.remedy = NEVER_FINITE
        self._scales_loss = False  # whether a scaler of the loop lowers its scale after steps that are not finite
        self._framework, self._options = framework, f"seed={seed}, verify={verify}, {verify_every}"
        self._loop = LoopArrays(state)
        named: Mapping[str, Any] = self._tensors  # leaves with gradients, as parameters of a model are
        self._parameters: Mapping[str, Parameter] = named
        self._refuse_shared_work()
        comm_thread = self._join(() if self.part_group is None else self.part_group.transports)
        self.status.record = recorded
        self._given = GivenGradients()
        self._check = ParameterCheck(None, self._parameters, verify, transport.rank, every=verify_every)
        self._gave, self._uses = False, False
        self._versions: dict[str, int] = {}
        self._extra_state: Mapping[str, Tensor] = {}  # arrays of the loop that ranks take over at the end of an epoch
        fragments = self._build_layout(
            None if server_optimizer is None else server_optimizer([*self._tensors.values()])
        )
        place = transport.rank, transport.world
        events.emit(lifecycle_events.begun_with(self.recipe, fragments, place, tensors=len(self._tensors)))
        try:
            self._begin(fragments)
        except BaseException:
            comm_thread.close()
            raise
        if self._changes.handed_over and state is None:
            events.notice(NO_STATE)
        self._opened()

    def _refuse_shared_work(self) -> None:
        together = self._transport.world > 1 or elastic(self._transport) is not None
        if together and (owned := ownership(self.recipe.compressor, self._parameters)):
            raise AttachError(
                f"{self.recipe.compressor!r} applies the optimizer's momentum to {next(iter(owned))!r}, and a session "
                "of arrays does not know the optimizer. Write TopK(density=0.01), which goes with every optimizer."
            )

    def _fingerprint(self) -> dict[str, str]:
        options = f"clip_norm=None, scaler=False, {self._options}"
        return startup_checks.fingerprint(
            recipe=repr(self.recipe), layout=self._layout, optimizer=None, options=options
        )

    def _compare_ranks(self) -> bool:
        all_gather_text = self._group.all_gather_text
        here = {startup_checks.HOST: socket.gethostname(), startup_checks.FRAMEWORK: self._framework}
        mixed = startup_checks.compare(all_gather_text(json.dumps({**self._fingerprint(), **here})))
        startup_checks.hand_out([*self._tensors.values()], all_gather_text, self._group.broadcast_)
        return mixed

    def _loop_state(self) -> LoopState:
        def now() -> StepContext:
            return StepContext(settings=settings(None, weighted=self._weighs), first_batch=-1)

        return LoopState(
            now=now,
            scale=lambda: None,
            buffers=lambda: (),
            averaged=dict,
            frozen=FrozenParameters(),
            copies=WeightCopies(),
            warn=lambda batches: None,
            ended=self.status.step_ended,
            judged=self._judge,
            check=self._check,
            divide_data=partial(uneven_inputs.divide_data, self._world, self._group),
            extensions=self._extensions,
            gradients=self._given.watch,
            agree=unchanged if self.part_group is None else self.part_group.agree,
            agree_in_round=unchanged if self.part_group is None else self.part_group.agree_in_round,
        )

    def _judge(self, what: JudgedAt, blame: NonFiniteOrigin | None) -> None:
        if blame is not None or not self._nonfinite.is_clear:
            self._nonfinite.judge(what, blame, self.steps, scaled=self._scales_loss)

    # -- in the loop -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank among those that train together."""
        return self._transport.rank

    @property
    def stats(self) -> SessionStats:
        """Bytes, seconds and compression ratio of the last step and of all steps, on this worker."""
        return self.status.stats(self._tensors.values())

    @property
    def parameters(self) -> dict[str, Array]:
        """The parameters as this worker has them now."""
        return {name: like(self._kinds[name], tensor) for name, tensor in self._tensors.items()}

    @property
    def state(self) -> dict[str, Array]:
        """The arrays of `state` to continue with: the loop's own; after `load_state_dict` those of the checkpoint, on a
        newcomer to an elastic run those of the other workers."""
        return self._loop.arrays()

    def give(self, gradients: Arrays, weight: float | None = None) -> dict[str, Array] | None:
        """Average the gradients of one backward pass; with local training they are returned unchanged.

        Returns None if no step is to be made: gradients are still accumulated, a rank's were not finite, or servers
        make the step. Call `took_step` also then, with unchanged parameters, except within `no_sync`.

        Args:
            gradients: an array for each parameter, of its shape and dtype.
            weight: of this rank's batch in the mean, usually its number of samples. Persists until the next one.

        Raises:
            LayoutError: for names, shapes or dtypes that are not those of the parameters.
            LoopError: for a second call without `took_step`; where the loop has not taken over `session.state`.
        """
        self._loop.check_taken_over(self.rank)
        if self._gave:
            raise LoopError(
                "give() was called twice without took_step(). Call session.took_step(parameters) after each give(), "
                "also where it returned None; to add gradients up, write `with session.no_sync():` around all but the "
                "last."
            )
        fresh = {name: self._fitting(name, array, "gradient") for name, array in self._all_of(gradients).items()}
        if weight is not None:
            self._weigh(weight)
        self._given.give(self._tensors, fresh)
        if self._synchronizer.controls.muted:
            return None
        self._gave = True
        for begin in self._extensions.pass_began:
            begin()
        self._synchronizer.before_step(closure=False)
        self._uses = all(tensor.grad is not None for tensor in self._tensors.values())
        self._versions = self._written()
        if not self._uses:
            return None
        return {name: like(gradients[name], tensor.grad) for name, tensor in self._tensors.items()}

    def took_step(self, parameters: Arrays) -> dict[str, Array]:
        """Return the parameters to continue with, after the loop's step with the result of `give`: the given ones, or
        the averaged ones if the recipe averages parameters now.

        Raises:
            LayoutError: for names, shapes or dtypes that are not those of the session's parameters.
            LoopError: where no `give` came before.
        """
        if not self._gave:
            raise LoopError("took_step() comes after give(), once for each. Call session.give(gradients) first.")
        stepped = {name: self._fitting(name, array, "array") for name, array in self._all_of(parameters).items()}
        self._gave = False
        if self._uses:
            with torch.no_grad():
                for name, tensor in stepped.items():
                    self._tensors[name].copy_(tensor)
            self._versions = self._written()
        for tensor in self._tensors.values():
            tensor.grad = None
        self._synchronizer.after_step()
        self._step_over()
        return self._handed_out(parameters, kept=self._uses)

    def _written(self) -> dict[str, int]:
        return {name: tensor._version for name, tensor in self._tensors.items()}

    def _handed_out(self, given: Arrays, *, kept: bool) -> dict[str, Array]:
        """Parameters; `given` ones themselves where they are the same since they were taken."""
        now = self._written()
        return {
            name: given[name] if kept and now[name] == self._versions[name] else like(given[name], tensor)
            for name, tensor in self._tensors.items()
        }

    def end_epoch(self, state: Arrays | None = None) -> tuple[dict[str, Array], dict[str, Array]]:
        """Wait until every rank is out of data: they may have different numbers of batches. Every rank calls it once
        per epoch. A rank that missed steps takes over parameters, and `state`, from one that made all of them.

        Args:
            state: more arrays by name, such as the optimizer's moments; the same names on every rank.

        Returns:
            parameters and state to continue with.
        """
        for begin in self._extensions.pass_began:
            begin()
        self._extra_state = extra_state = {name: as_tensor(array).clone() for name, array in (state or {}).items()}
        kept = self._accumulates_locally
        self._end_epoch()
        uneven_inputs.leave_epoch(self._world, self._group, together=self._synchronizer.in_step)
        self._extra_state = {}
        if not kept:
            for tensor in self._tensors.values():
                tensor.grad = None
        return self.parameters, {name: like((state or {})[name], tensor) for name, tensor in extra_state.items()}

    def _catch_up(self, missed: int) -> None:
        tensors = [*self._tensors.values(), *self._extra_state.values()]
        self._group.together(partial(uneven_inputs.catch_up, tensors, [], missed, self._group))

    def averaged_parameters(self) -> dict[str, Array]:
        """The parameters for evaluation and saving: with local training the mean or the servers' parameters, otherwise
        the current ones. Every rank calls it after the same step."""
        merged = self._synchronizer.merge() or {}
        return {name: like(self._kinds[name], merged.get(name, own)) for name, own in self._tensors.items()}

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank. All of them call it at the same place."""
        return self._group.all_gather_text(text)

    def log(self, **metrics: float) -> None:
        """Write numbers into the run's record: session.log(loss=0.3)."""
        values = {name: float(value) for name, value in metrics.items()}
        events.emit(events.Logged(step=self.steps, values=values))

    # -- elastic runs ----------------------------------------------------------------------------------------------

    def _newcomers_fingerprint(self) -> dict[str, str]:
        return {**self._fingerprint(), "state": f"{rng.address(self._loop.forms()):x}"}

    def _shared_state(self) -> dict[str, Any]:
        return {"parameters": dict(self._tensors), "state": self._loop.tensors()}

    def _take_up(self, alike: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        with torch.no_grad():
            copy_parameters(alike["parameters"], self._tensors)
        self._loop.receive(alike["state"])

    # -- saving and ending -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint: its parameters, as torch tensors, and the recipe's state.

        All ranks call it after the same step. It contains the arrays of `state`. Save the position in the data, and an
        optimizer's state that is not in `state`, next to it.
        """
        self._synchronizer.meet_to_save()
        state = {**self._session_state(), "parameters": self._tensors, "loop": self._loop.tensors()}
        return {key: _copied(value) for key, value in state.items()}

    def _session_state(self) -> dict[str, Any]:
        return session_checkpoint.session_state(
            self.recipe,
            self._layout,
            self._transport,
            self._synchronizer,
            earlier={},
            attached=repr(self.recipe),
            first_bytes=self._stages.first_bytes,
        )

    def load_state_dict(self, *states: Mapping[str, Any]) -> dict[str, Array]:
        """Restore the result of `state_dict` from the same rank; or, if another number of workers saved it, the states
        of all those ranks in order. Returns the parameters to continue with; `session.state` has the arrays of `state`.
        A newcomer to an elastic run loads nothing: it continues from the state of the other workers.

        Raises:
            CheckpointError: for the state of another recipe or layout, and for other arrays in `state`.
        """
        if self._changes.handed_over:
            return self.parameters
        for tensor in self._tensors.values():
            tensor.grad = None  # of passes in no_sync before
        own = session_checkpoint.own_state(states, self._transport)
        self._enter_restored_stage(own["passes"], session_checkpoint.first_bytes(own))
        local = self._session_state()
        session_checkpoint.refuse_misfit({**own, "rank": local["rank"], "world": local["world"]}, local)
        if own.get("loop"):
            self._loop.receive(own["loop"])
        with torch.no_grad():
            copy_parameters(own["parameters"], self._tensors)
        session_checkpoint.restore(states, local, self._transport, self._synchronizer)
        if own["world"] != local["world"]:
            with torch.no_grad():
                found = agreed(states)
                copy_parameters(found, {name: each for name, each in self._tensors.items() if name in found})
            self._synchronizer.restart()
        self._gave = False
        return self.parameters

    def _held(self) -> Mapping[str, Tensor]:
        return self._tensors

    def _compared(self, closed: events.Closed) -> events.Closed:
        return super()._compared(closed) if self.part_group is None else self.part_group.whole(closed)

    # -- arrays ----------------------------------------------------------------------------------------------------

    def _all_of(self, arrays: Arrays) -> Arrays:
        """`arrays` in the session's order. Raises LayoutError where names are missing or unknown."""
        missing = [name for name in self._tensors if name not in arrays]
        unknown = [name for name in arrays if name not in self._tensors]
        if missing or unknown:
            texts = " and ".join(
                f"{names} {how}" for names, how in ((missing, "missing"), (unknown, "unknown")) if names
            )
            raise LayoutError(
                f"rank {self.rank}: the names are not those of this session's parameters: {texts}. Give one array "
                "for each of them; "
                "for other parameters construct a new session on every rank."
            )
        return {name: arrays[name] for name in self._tensors}

    def _fitting(self, name: str, array: Array, what: str) -> Tensor:
        tensor, own = as_tensor(array), self._tensors[name]
        if tensor.shape != own.shape or tensor.dtype != own.dtype:
            raise LayoutError(
                f'rank {self.rank}: the {what} of "{name}" has shape {tuple(tensor.shape)} and dtype '
                f"{dtype_name(tensor.dtype)}; the "
                f"parameter has {tuple(own.shape)} and {dtype_name(own.dtype)}. Give it in the parameter's, as by "
                "array.astype(parameter.dtype)."
            )
        return tensor.to(own.device)


def _refuse_servers(transport: Transport) -> None:
    if served(transport) is not None:
        raise AttachError(
            "in an elastic run with servers the session must own the parameters, since each worker adopts those of the "
            "servers between two steps. Use gossamer.attach with a torch model, or run a fixed number of workers: "
            "gossamer run --workers 4 --servers 1."
        )


def _refuse_elastic_replicas() -> None:
    if is_elastic():
        raise AttachError(
            "replicas= names ranks that hold the same arrays, and ranks change in an elastic run; the loss of one "
            "process would end all processes of its worker. Let each worker be one process, or run a fixed number: "
            "gossamer run --workers 4 --max-restarts 1."
        )


class LoopArrays:
    """The arrays of a loop besides its parameters, such as the moments of its optimizer.

    read: returns them as the loop has them now; None: it has none.
    """

    def __init__(self, read: Callable[[], Arrays] | None) -> None:
        self._read: Callable[[], Arrays] = read or dict
        self._kinds = {name: kind_of(array) for name, array in self._read().items()}
        self._received: Mapping[str, Tensor] | None = None  # until the next step

    def tensors(self) -> dict[str, Tensor]:
        """The arrays to continue from, in the loop's memory where possible."""
        return self._own() if self._received is None else {**self._received}

    def arrays(self) -> dict[str, Array]:
        """The arrays to continue from: the loop's own, or copies of those that were received."""
        if self._received is None:
            return {**self._read()}
        return {name: like(self._kinds[name], tensor) for name, tensor in self._received.items()}

    def forms(self) -> str:
        """Names, shapes and dtypes."""
        return _forms(self._own())

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """The loop is to continue from `tensors`. Raises CheckpointError where they do not fit its own."""
        if (remote := _forms(tensors)) != (own := self.forms()):
            raise CheckpointError(
                f"the state to continue from has the arrays {remote or 'none'}, and state= of this loop returns "
                f"{own or 'none'}. Construct the optimizer that it was written with, and pass the same state=."
            )
        self._received = {**tensors}

    def check_taken_over(self, rank: int) -> None:
        """The loop makes a step. Raises LoopError where it does not continue from what was received."""
        if self._received is None:
            return
        own, received, self._received = self._own(), self._received, None
        if unlike := [name for name in own if len({*startup_checks.tensor_hashes([own[name], received[name]])}) > 1]:
            raise LoopError(
                f"rank {rank}: the loop has not taken over the state of the other workers, or of the checkpoint: "
                f"{', '.join(unlike)} differ, so its next step would make other parameters. With state=lambda: moments "
                "write moments = session.state after the session is constructed, and after load_state_dict."
            )

    def _own(self) -> dict[str, Tensor]:
        return {name: as_tensor(array) for name, array in self._read().items()}


def _forms(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {dtype_name(each.dtype)}{[*each.shape]}" for name, each in sorted(tensors.items()))


def _copied(tree: Any) -> Any:
    """The same with copies of all tensors: later steps write to residuals, and to means that are in flight."""
    match tree:
        case Tensor():
            return tree.clone()
        case Mapping():
            return {key: _copied(value) for key, value in tree.items()}
        case list():
            return [_copied(value) for value in tree]
    return tree


def estimate(parameters: Mapping[str, Any], recipe: Written, *, workers: int) -> TrafficEstimate:
    """Bytes that one of `workers` sends and keeps, computed by the recipe's own algorithms. Trains nothing.

    Args:
        parameters: arrays by name; or (shape, dtype), as ((3, 4), "float32"), or objects with `shape` and `dtype`.
        recipe, workers: as for gossamer.attach; the number of workers.

    Example:
        >>> gossamer.engine.estimate({"weight": ((1000, 100), "float32")}, "TopK(0.01)", workers=4).bytes_sent
        15378.0
    """
    resolved = resolve(recipe, workers)
    named: Mapping[str, Any] = {name: _blank(each) for name, each in _named(parameters).items()}
    at = AggregationContext(seed=0, rank=0, world=workers)
    fragments = bucket_fragments(resolved.strategy.steady_stage, named, resolved.compressor, at)
    begun = lifecycle_events.begun_with(resolved, fragments, (0, workers), tensors=len(named))
    return estimate_traffic(resolved, begun, workers=workers)


def _named(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(parameters, Mapping) or not parameters:
        raise AttachError(
            "parameters are arrays by name, at least one: {'weight': array}. Flatten a tree of them first, as by "
            "jax.tree_util.tree_flatten_with_path."
        )
    return parameters


def _blank(described: Any) -> Tensor:
    shape, dtype = described if isinstance(described, tuple) else (described.shape, described.dtype)
    return torch.empty(tuple(shape), dtype=dtype if isinstance(dtype, torch.dtype) else _dtype(dtype), device="meta")


def _dtype(dtype: Any) -> torch.dtype:
    return dtype_of(str(getattr(dtype, "name", dtype)))
