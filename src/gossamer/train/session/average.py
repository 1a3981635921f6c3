"""Averaging: gossamer.average_ averages tensors over all workers in one call, without a session."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.base import aggregate_finite
from gossamer.algorithms.compressors.sharded import is_group_residual, settle
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout, Slot
from gossamer.base.ops import AllGather, CollectiveOp, Script
from gossamer.base.runner import run_script
from gossamer.base.transport import Transport
from gossamer.comm.environment.roll_call import RollCall
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.comm.mesh.collective_selector import requested_collective
from gossamer.errors import CheckpointError, LayoutError, LoopError, MismatchError
from gossamer.train.checkpoint.files import MALFORMED
from gossamer.train.engine.bucket import KeptInputs
from gossamer.train.session.group_calls import newest_group
from gossamer.train.session.named_values import gathered, survivor_calls
from gossamer.train.session.recipe_choice import compressor_alone
from gossamer.train.session.transport_setup import group_transport
from gossamer.train.world_state import WorldState, current


class AverageState:
    """A compressor's state for many tensors, by name, while their layout changes between calls."""

    def __init__(self, compressor: Compressor, transport: Transport) -> None:
        self.compressor, self.transport, self.step = compressor, transport, 0
        self.run: Callable[[Callable[[], Script]], Any] = self._run_here
        self.kept: KeptInputs | None = None  # if the group may change
        self._states: dict[str, State] = {}  # by the layout's fingerprint

    def average_(self, x: FlatTensors) -> None:
        """Overwrite x with the mean over the group, or with NaN on every rank if a rank's values are not finite."""
        if self.kept is not None:
            self.kept.clear()
        (staged, agreed), state = self.run(lambda: self._script(x))
        if not agreed:
            x.flat.fill_(torch.nan)
        elif state:
            self._states[x.layout.fingerprint()] = staged.next_state.after(state)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the compressor's state on this rank, by tensor name. Each rank saves its own.

        Returns:
            Only text, numbers, lists and tensors, so that torch.load(..., weights_only=True) reads it.
        """
        return {
            "compressor": repr(self.compressor),
            "rank": self.transport.rank,
            "world": self.transport.world,
            "step": self.step,
            "remembered": [
                {key: {"slots": _slots(packed.layout), "flat": packed.flat.clone()} for key, packed in state.items()}
                for state in self._states.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` of the same rank; buckets and devices of the tensors may differ.

        Raises:
            CheckpointError: another compressor, rank or number of workers wrote it, or it is incomplete.
        """
        own = {"compressor": repr(self.compressor), "rank": self.transport.rank, "world": self.transport.world}
        for key, value in own.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"this state has the {key} {state.get(key)!r}, but this run has {value!r}. Load a state saved by "
                    "the same rank with the same compressor and number of workers, or begin without a saved state."
                )
        try:
            loaded = [State({key: _packed(each) for key, each in saved.items()}) for saved in state["remembered"]]
            self.step = int(state["step"])
        except MALFORMED as error:
            raise CheckpointError(
                f"this state is damaged or incomplete ({type(error).__name__}: {error}). Load a complete one, or begin "
                "without a saved state."
            ) from error
        # Temporary keys: the next call moves each tensor to its new layout
        self._states = {f"loaded {number}": each for number, each in enumerate(loaded)}

    def _script(self, x: FlatTensors) -> Script:
        if self.kept is not None:
            self.kept.keep(0, x.flat)
        at = AggregationContext(step=self.step, rank=self.transport.rank, world=self.transport.world)
        state = self._state(x, at)
        return (yield from _voted(self.compressor, x, state, at)), state

    def _run_here(self, script: Callable[[], Script]) -> Any:
        return run_script(script(), self.transport).result

    def _state(self, x: FlatTensors, at: AggregationContext) -> State:
        """The state for this layout; state of tensors that were in another layout before is moved."""
        key = x.layout.fingerprint()
        if key not in self._states:
            state = self.compressor.init(x, at)
            names = set(x.layout.names)
            for other in [k for k, old in self._states.items() if names & _names(old)]:
                settle(self._states[other], at)
                _move(self._states[other], state)
                old = self._states.pop(other)
                if _names(old) - names:
                    self._states[f"{other} without {key}"] = _without(names, old)
            self._states[key] = state
        return self._states[key]


def _slots(layout: Layout) -> list[list[Any]]:
    return [[slot.name, list(slot.shape), slot.offset, list(slot.stride)] for slot in layout]


def _packed(saved: Mapping[str, Any]) -> FlatTensors:
    slots = tuple(Slot(name, tuple(shape), offset, tuple(stride)) for name, shape, offset, stride in saved["slots"])
    layout, flat = Layout(slots), saved["flat"].clone()
    if len(flat) < layout.numel:
        raise ValueError(f"only {len(flat)} of {layout.numel} entries")
    return FlatTensors(flat, layout)


def _names(state: State) -> set[str]:
    return {name for packed in state.values() for name in packed.layout.names}


def _without(names: set[str], state: State) -> State:
    """A settled state without these tensors, so that each tensor has one state only."""
    others = _names(state) - names
    return State({key: packed.restrict(others) for key, packed in state.items() if not is_group_residual(key)})


def _move(old: State, new: State) -> None:
    for key, packed in new.items():
        for name, view in packed.items() if not is_group_residual(key) else ():
            if key in old and name in old[key].layout.by_name:
                if old[key][name].shape != view.shape:
                    raise LayoutError(
                        f'"{name}" was {tuple(old[key][name].shape)} and is {tuple(view.shape)} now, so its '
                        "compressor state is invalid. Begin with an empty state."
                    )
                view.copy_(old[key][name])


def _voted(
    compressor: Compressor, x: FlatTensors, state: State, at: AggregationContext
) -> Generator[CollectiveOp, Any, tuple[AggregationResult, bool]]:
    """Aggregate, then all-gather whether every rank's values were finite."""
    lost: list[bool] = []
    staged: AggregationResult = yield from aggregate_finite(compressor, x, state, at, x.flat, lambda: lost.append(True))
    flag = torch.tensor([not lost and staged.finite], dtype=torch.uint8, device="cpu")
    received = yield AllGather((flag,))
    return staged, all(bool(remote.item()) for (remote,) in received)


_shared: WeakKeyDictionary[WorldState, Transport] = WeakKeyDictionary()


def shared_transport() -> Transport:
    """One group for all such calls of this worker while no session is open. Raises LoopError in an elastic run."""
    world = current()
    if world not in _shared:
        if is_elastic():
            raise LoopError(
                "workers of an elastic run have a group only while a session is open. Call gossamer.attach first, and "
                "make collective calls before session.close()."
            )
        events.emit(events.WithoutSession(trains=False))
        _shared[world] = world.own_transport() or group_transport(world, requested_collective())
    return _shared[world]


@dataclass(frozen=True)
class CallLane:
    """Transport of average_, mean and gather: in sequence with a session's operations, so that a call on one rank only
    meets another rank's step, and both raise an error instead of waiting forever."""

    caller: str
    transport: Transport
    perform: Callable[[Callable[[], Script]], Any]
    keeps: bool = False  # if the group may change

    @classmethod
    def of_this_process(cls, caller: str) -> CallLane:
        group = newest_group()
        if group is None or not group.has_all(current().size):
            transport = shared_transport()
            return cls(caller, transport, lambda script: run_script(script(), transport).result)
        return cls(caller, group.transport, group.run, keeps=not group.comm_thread.is_fixed)

    def run(self, script: Callable[[], Script]) -> Any:
        try:
            return self.perform(script)
        except MismatchError as failure:
            raise MismatchError(
                f"gossamer.{self.caller} was called on this rank while another made a step or called something else. "
                f"Call it on every rank at the same place of the loop, not only where world.is_first. ({failure})"
            ) from failure


def average_(
    tensors: Iterable[Tensor] | Mapping[str, Tensor],
    compressor: Compressor | str,
    state: dict[str, Any] | None = None,
) -> None:
    """Overwrite `tensors` with their means over all workers. Every rank must call it with the same shapes.

    A value that is not finite on one rank makes the tensors of its dtype NaN on all ranks and leaves the state
    unchanged. With recipes that tolerate the loss of a worker (dedicated parameter servers, pairwise gossip) the means
    are over the remaining workers and uncompressed, since a compressor would need answers from all workers.

    Args:
        tensors: tensors of real floating-point numbers, possibly by name.
        compressor: a Compressor, or its text, completed as in a recipe; `gossamer run --recipe` does not replace it.
        state: for compressors with state (Feedback, PowerSGD): an empty dict at first, and the same one at every later
            call. Each rank saves its own as {kind: each.state_dict() for kind, each in state.items()}, and passes that
            as `state` to resume.

    Raises:
        ValueError: a state is needed and missing, or belongs to another compressor.
        RecipeError: the text has a strategy or a topology, which would be ignored.
        TypeError: a value is not a tensor of floating-point numbers.
        MismatchError: another rank made a step or another call at the same time.

    Example:
        >>> gradients = {"weight": torch.ones(3)}
        >>> gossamer.average_(gradients, "Int8()")
        >>> gradients["weight"]
        tensor([1., 1., 1.])
    """
    named = _by_name(tensors)
    world = current()
    chosen = compressor if isinstance(compressor, Compressor) else compressor_alone(compressor, world, "average_")
    if world.size == 1 or not named:
        return
    if strange := {str(tensor.dtype) for tensor in named.values() if not _adds_up(tensor.dtype)}:
        raise TypeError(f"average_ averages real numbers, not {', '.join(strange)}: pass tensor.float() instead")
    calls = survivor_calls(world)
    lane = CallLane.of_this_process("average_") if calls is None else None
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        kinds.setdefault(f"{tensor.device} {tensor.dtype}", {})[name] = tensor.detach()
    for kind, group in kinds.items():
        packed = FlatTensors.pack(group)
        if state is None and chosen.init(packed, AggregationContext(world=world.size)):
            raise ValueError(
                f"{chosen!r} keeps state between calls and needs a place for it. Write `state = {{}}` once, "
                "and gossamer.average_(tensors, compressor, state=state) each time."
            )
        if calls is not None:
            _average_whole(calls, packed)
        elif lane is not None:
            _average_compressed(lane, chosen, packed, kind, {} if state is None else state)
        for name, view in packed.items():
            group[name].copy_(view)


def _average_compressed(
    lane: CallLane, chosen: Compressor, packed: FlatTensors, kind: str, state: dict[str, Any]
) -> None:
    memory = state.setdefault(kind, AverageState(chosen, lane.transport))
    if isinstance(memory, Mapping):  # as saved
        saved, memory = memory, AverageState(chosen, lane.transport)
        memory.load_state_dict(saved)
        state[kind] = memory
    if memory.compressor != chosen:
        raise ValueError(f"this state belongs to {memory.compressor!r}: begin with an empty one for {chosen!r}")
    memory.run, memory.kept = lane.run, KeptInputs() if lane.keeps else None
    memory.average_(packed)
    memory.step += 1


def _average_whole(calls: RollCall, x: FlatTensors) -> None:
    """Overwrite x with the exact mean over the remaining ranks, or with NaN if a rank's values are not finite."""
    found = gathered(calls, "average_", dict(x.items()))
    for name, view in x.items():
        total = torch.zeros(view.shape, dtype=torch.float64, device="cpu")
        for each in found:
            total += each[name].cpu()
        view.copy_(total / len(found))
    if not torch.isfinite(x.flat).all():
        x.flat.fill_(torch.nan)


def _by_name(tensors: Iterable[Tensor] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(tensors, Mapping):
        named = dict(tensors)
    elif isinstance(tensors, Iterable):
        named = {str(place): tensor for place, tensor in enumerate(tensors)}
    else:
        named = {"tensors": tensors}
    if strange := [type(each).__name__ for each in named.values() if not isinstance(each, Tensor)]:
        raise TypeError(
            f"average_ overwrites tensors with their means, but got {', '.join(sorted(set(strange)))}. Write "
            "gossamer.average_([tensor], ...), and torch.tensor(value) for a number."
        )
    return named


def _adds_up(dtype: torch.dtype) -> bool:
    """Whether the dtype supports addition of real numbers; 8-bit floating-point formats do not."""
    return dtype.is_floating_point and torch.finfo(dtype).bits >= 16
