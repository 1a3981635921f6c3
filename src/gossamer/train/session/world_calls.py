"""World calls: barrier, broadcast, all_gather and all_reduce among all workers, outside of steps.

A call travels on the newest session's communication thread, so it keeps its place among the steps; without a session it
uses a group of its own. With recipes that tolerate the loss of a worker it is a roll call of the remaining workers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import sha256
from math import fsum, prod
from struct import Struct
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gossamer.base.bounded_mean import mean_of, tensor_mean
from gossamer.base.layout import dtype_name, dtype_of
from gossamer.base.ops import AllGather, AllToAll, CollectiveOp, Script
from gossamer.base.runner import broadcast as broadcast_tensors
from gossamer.base.runner import run_script
from gossamer.base.transport import Transport
from gossamer.comm.environment.wait_timeout import duration
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.errors import LoopError, MismatchError, PeerLost
from gossamer.train.session.average import shared_transport
from gossamer.train.session.group_calls import newest_group
from gossamer.train.session.named_values import survivor_calls, tensor_of
from gossamer.train.world_state import WorldState, current

Reduction = Literal["mean", "sum", "min", "max"]
T = TypeVar("T")
_LENGTH = Struct("!Q")
_ARRAY_KINDS = "biufcmM"  # bools, numbers, dates and durations
_locks: WeakKeyDictionary[Transport, threading.Lock] = WeakKeyDictionary()  # of groups without a session


@dataclass(frozen=True)
class Call:
    """One rank's call. form: everything that must be the same on every rank, such as the shape of a tensor."""

    name: str  # of the method
    form: str = ""

    @property
    def text(self) -> str:
        return f"world.{self.name}({self.form})"

    @property
    def code(self) -> int:
        return int.from_bytes(sha256(self.text.encode()).digest()[:8], signed=True)


def barrier(world: WorldState, timeout: timedelta | None = None) -> None:
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r} has no unit. Write world.barrier(timeout=timedelta(minutes=5)), with "
            "from datetime import timedelta."
        )
    wait = partial(_gathered, world, Call("barrier"), b"")
    if timeout is None or world.size == 1:
        wait()
    else:
        _within(timeout.total_seconds(), wait, world)


def broadcast(world: WorldState, value: Any, root: int = 0) -> Any:
    if type(root) is not int or not 0 <= root < world.size:
        raise ValueError(
            f"root must be a rank from 0 to {world.size - 1}, got {root!r}. Example: world.broadcast(x, 0)"
        )
    call = Call("broadcast", f"root={root}")
    content = packed(value, call.name) if world.rank == root else b""

    def perform(transport: Transport) -> bytes | None:
        lengths = _agreed(transport, call, len(content))
        source = next((rank for rank, length in enumerate(lengths) if length), None)  # ranks may have changed meanwhile
        if source is None:
            return None
        tensor = tensor_of(content) if content else torch.empty(lengths[source], dtype=torch.uint8, device="cpu")
        broadcast_tensors(transport, [tensor], source)
        return bytes_of(tensor)

    found = _performed(world, call, content, perform, lambda values: values.get(root))
    if found is None:
        raise PeerLost(f"rank {root} was lost, so {call.text} has no value. Broadcast from a rank that is left.")
    return unpacked(found, world.device)


def all_gather(world: WorldState, value: T) -> list[T]:
    call = Call("all_gather")
    return [unpacked(each, world.device) for each in _gathered(world, call, packed(value, call.name))]


def all_reduce(world: WorldState, value: Any, op: Reduction = "mean") -> Any:
    if op not in get_args(Reduction):
        raise ValueError(
            f'op must be "mean", "sum", "min" or "max", got {op!r}. Example: world.all_reduce(loss, "mean")'
        )
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in (bool, int, float):
        found = _gathered(world, Call("all_reduce", f"a number, {op}"), packed(value, "all_reduce"))
        return _reduced_numbers([unpacked(each, world.device) for each in found], op)
    if isinstance(value, np.ndarray):
        return _reduced_array(world, value, op)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"world.all_reduce takes a tensor, a NumPy array or a number, got {type(value).__name__}. Reduce each "
            "entry of a container by a call of its own, or use world.all_gather."
        )
    return _reduced_tensor(world, value, op)


# -- reductions --------------------------------------------------------------------------------------------------------


def _reduced_numbers(values: Sequence[float], op: Reduction) -> float:
    match op:
        case "mean":
            return mean_of(map(float, values))
        case "sum":
            return sum(values) if all(isinstance(each, int) for each in values) else fsum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)


def _reduced_array(world: WorldState, value: np.ndarray[Any, Any], op: Reduction) -> Any:
    try:
        tensor = torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"world.all_reduce cannot reduce a NumPy array of dtype {value.dtype} ({error}). Convert it, for example "
            "by value.astype(numpy.float64)."
        ) from error
    return _reduced_tensor(world, tensor, op, torch.float64).numpy()


def _reduced_tensor(world: WorldState, value: Tensor, op: Reduction, fractions: torch.dtype | None = None) -> Tensor:
    """fractions: the dtype of means of integers and bools; None: the default dtype."""
    if value.layout != torch.strided or (not _is_ordered(value.dtype) and op in ("min", "max")):
        kind = "sparse" if value.layout != torch.strided else "complex" if value.is_complex() else "uint64"
        raise TypeError(
            f"world.all_reduce cannot take the {op} of a {kind} tensor. Pass a dense tensor of real numbers, such as "
            "int64 in place of uint64."
        )
    call = Call("all_reduce", f"a tensor of shape {tuple(value.shape)} and {dtype_name(value.dtype)}, {op}")
    flat = _flat(value)
    combine = partial(_combined, op=op, fractions=fractions or torch.get_default_dtype())

    def reduced(transport: Transport) -> Tensor:
        _agreed(transport, call, 0)
        found: Tensor = (
            run_script(_reduction(flat, combine, transport.world), transport).result if len(flat) else combine([flat])
        )
        return found

    def of_survivors(values: Mapping[int, bytes]) -> Tensor:
        return combine([tensor_of(each).view(flat.dtype) for each in values.values()])

    # Only a roll call reads the bytes
    found: Tensor = _performed(world, call, lambda: bytes_of(flat.view(torch.uint8)), reduced, of_survivors)
    return found.view(value.shape).to(value.device)


def _reduction(
    flat: Tensor, combine: Callable[[Sequence[Tensor]], Tensor], world: int
) -> Generator[CollectiveOp, Any, Tensor]:
    """Each rank reduces one part and sends it to all: the result has the same bits everywhere."""
    share = -(-len(flat) // world)
    padded = flat.new_zeros(share * world)
    padded[: len(flat)] = flat
    parts = tuple((part.view(torch.uint8),) for part in padded.split(share))
    local = combine([part.view(flat.dtype) for (part,) in (yield AllToAll(parts))])
    found = yield AllGather((local.view(torch.uint8),))
    return torch.cat([part for (part,) in found]).view(local.dtype)[: len(flat)]


def _combined(values: Sequence[Tensor], op: Reduction, fractions: torch.dtype) -> Tensor:
    kind = values[0].dtype
    whole = not (kind.is_floating_point or kind.is_complex)
    if op in ("min", "max"):
        stacked = torch.stack([each.to(_comparable(kind)) for each in values])
        return (stacked.amin(0) if op == "min" else stacked.amax(0)).to(kind)
    wide = torch.complex128 if kind.is_complex else torch.int64 if whole and op == "sum" else torch.float64
    if op == "mean":
        mean = tensor_mean(torch.stack([each.to(wide) for each in values]))
        return mean.to(fractions if whole else kind)
    total = torch.zeros_like(values[0], dtype=wide)
    for each in values:
        total += each.to(wide)  # torch promotes neither uint16 to uint64 nor 8-bit floating-point formats
    return total if whole else total.to(kind)


def _is_ordered(dtype: torch.dtype) -> bool:
    """Whether torch compares values of this dtype, or represents all of them in one that it compares."""
    return not dtype.is_complex and dtype != torch.uint64


def _comparable(dtype: torch.dtype) -> torch.dtype:
    """A dtype with minima that represents all values of `dtype`."""
    if dtype in (torch.uint16, torch.uint32):
        return torch.int64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


# -- travel ------------------------------------------------------------------------------------------------------------


def _gathered(world: WorldState, call: Call, content: bytes) -> list[bytes]:
    """The contents of all remaining ranks, by rank."""

    def perform(transport: Transport) -> list[bytes]:
        lengths = _agreed(transport, call, len(content))
        return _all_gathered(transport, content, lengths)

    return _performed(world, call, content, perform, lambda values: list(values.values()))


class _Differing(Exception):
    """Ranks made different calls. Caught before it leaves the communication thread, which would end with it."""


def _agreed(transport: Transport, call: Call, length: int) -> list[int]:
    """Compare the calls of all ranks. Returns the lengths of their contents, by rank."""
    local = torch.tensor([call.code, len(call.text.encode()), length], device="cpu")
    headers = [part.tolist() for (part,) in _answer(transport, AllGather((local,)))]
    if any(code != call.code for code, _, _ in headers):
        texts = _all_gathered(transport, call.text.encode(), [size for _, size, _ in headers])
        raise _Differing(_by_rank(dict(enumerate(texts))))
    return [length for _, _, length in headers]


def _answer(transport: Transport, op: CollectiveOp) -> Any:
    def script() -> Script:
        return (yield op)

    return run_script(script(), transport).result


def _all_gathered(transport: Transport, content: bytes, lengths: Sequence[int]) -> list[bytes]:
    if not any(lengths):
        return [b""] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(content)] = tensor_of(content)
    payloads = _answer(transport, AllGather((padded,)))
    return [bytes_of(part[:length]) for (part,), length in zip(payloads, lengths, strict=True)]


def _performed(
    world: WorldState,
    call: Call,
    content: bytes | Callable[[], bytes],
    among_all: Callable[[Transport], T],
    among_survivors: Callable[[Mapping[int, bytes]], T],
) -> T:
    """Make a call in whichever way this worker reaches the others.

    Args:
        content: this rank's contribution to a roll call.
        among_all: The call over a transport; made again if the group changes meanwhile.
        among_survivors: The result, given the contents of the remaining ranks.
    """
    if world is not current():
        raise LoopError(
            f"{call.text} was called on the world of one dimension of a mesh, which only deals out data. Call it on "
            "gossamer.init(), on every rank; torch.distributed has collectives of mesh.get_group()."
        )
    own = content if isinstance(content, bytes) else content()
    if world.size == 1:
        return among_survivors({0: own})
    if (calls := survivor_calls(world)) is not None:
        form = call.text.encode()
        contents = calls.gather(f"world.{call.name}", call.form, b"".join((_LENGTH.pack(len(form)), form, own)))
        return among_survivors(_of_one_form(contents))

    def attempt(transport: Transport) -> tuple[list[T], str]:
        try:
            return [among_all(transport)], ""
        except _Differing as failure:
            return [], str(failure)

    try:
        found, differing = _over_newest_group(world, attempt)
    except MismatchError as failure:
        raise MismatchError(
            f"world.{call.name} was called on this rank while another made a step or called something else. Call it on "
            f"every rank at the same place of the loop, not only where world.is_first. ({failure})"
        ) from failure
    if differing:
        raise _mismatch(differing)
    return found[0]


def _over_newest_group(world: WorldState, calls: Callable[[Transport], T]) -> T:
    """Make calls on the communication thread of the newest session; without one, over a group for such calls."""
    group = newest_group()
    if group is not None and group.has_all(world.size):
        return group.together(lambda: calls(group.transport))
    transport = shared_transport()
    with _locks.setdefault(transport, threading.Lock()):  # a barrier may still wait there in another thread
        return calls(transport)


def _of_one_form(contents: Mapping[int, bytes]) -> dict[int, bytes]:
    """The contents by rank. Raises MismatchError where the calls had different forms."""
    ends = {rank: _LENGTH.size + _LENGTH.unpack_from(each)[0] for rank, each in contents.items()}
    forms = {rank: each[_LENGTH.size : ends[rank]] for rank, each in contents.items()}
    if len(set(forms.values())) > 1:
        raise _mismatch(_by_rank(forms))
    return {rank: each[ends[rank] :] for rank, each in contents.items()}


def _by_rank(forms: Mapping[int, bytes]) -> str:
    return "; ".join(f"rank {rank}: {form.decode()}" for rank, form in forms.items())


def _mismatch(calls: str) -> MismatchError:
    return MismatchError(
        f"ranks made different calls at once ({calls}). Make the same calls, with values of the same shape and dtype, "
        "in the same order on every rank."
    )


def _within(seconds: float, wait: Callable[[], object], world: WorldState) -> None:
    """Wait on a separate thread, which continues to wait after a timeout."""
    done: Future[object] = Future()

    def work() -> None:
        try:
            done.set_result(wait())
        except BaseException as failure:
            done.set_exception(failure)

    threading.Thread(target=copy_context().run, args=(work,), name="gossamer-barrier", daemon=True).start()
    try:
        with current_worker().waiting():
            done.result(seconds)
    except TimeoutError:
        if done.done():
            raise
        raise PeerLost(
            f"rank {world.rank} waited {duration(seconds)} in world.barrier for {world.size - 1} other workers, and "
            "some did not come. They still work, have failed, or never call it: look at their output. Allow more time, "
            "or call world.barrier on every rank."
        ) from None


# -- values ------------------------------------------------------------------------------------------------------------


def packed(value: Any, caller: str) -> bytes:
    """One value as bytes.

    Args:
        value: Numbers, text, None, bytes, tensors, NumPy arrays, and lists, tuples and dicts with text keys of them.
        caller: The method of World, for the error.

    Raises:
        TypeError: Any other type.
    """
    parts: list[bytes] = []
    header = json.dumps(_encoded(value, "value", caller, parts)).encode()
    return b"".join((_LENGTH.pack(len(header)), header, *parts))


def unpacked(content: bytes, device: torch.device) -> Any:
    """The value of `packed`. device: of tensors that were not on the CPU."""
    begin = _LENGTH.size
    (length,) = _LENGTH.unpack_from(content)
    return _ValueDecoder(content, begin + length, device).decoded(json.loads(content[begin : begin + length]))


def _flat(tensor: Tensor) -> Tensor:
    """tensor.flatten(), on the CPU and without views that defer a computation."""
    own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return own.as_strided((own.numel(),), (1,))  # one element is contiguous with any stride


def bytes_of(tensor: Tensor) -> bytes:
    """tensor: (n,) of uint8, on the CPU."""
    return tensor.contiguous().numpy().tobytes()


def _encoded(value: Any, place: str, caller: str, parts: list[bytes]) -> Any:
    """A JSON value: scalars and lists as they are, others as {type: ...}; binary contents are appended to `parts`."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [_encoded(each, f"{place}[{number}]", caller, parts) for number, each in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": [[key, _encoded(each, f"{place}[{key!r}]", caller, parts)] for key, each in value.items()]}
    if type(value) in (bytes, bytearray):
        parts.append(bytes(value))
        return {"bytes": len(value)}
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        parts.append(bytes_of(_flat(value).view(torch.uint8)))
        return {"tensor": [dtype_name(value.dtype), list(value.shape), value.device.type == "cpu"]}
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        parts.append(value.tobytes())
        return {"array": [value.dtype.str, list(value.shape)]}
    kind = "a dict with keys that are not text" if type(value) is dict else f"of type {type(value).__name__}"
    raise TypeError(
        f"world.{caller} takes numbers, text, None, bytes, tensors, NumPy arrays, and lists, tuples and dicts with "
        f"text keys of them, and {place} is {kind}. Values travel as JSON and bytes, since pickles could run code on "
        "arrival. Pass the fields that other ranks need, for example dataclasses.asdict(value)."
    )


class _ValueDecoder:
    """Decodes one header; the binary contents follow each other from `place`."""

    def __init__(self, content: bytes, place: int, device: torch.device) -> None:
        self._content, self._place, self._device = content, place, device

    def decoded(self, header: Any) -> Any:
        if isinstance(header, list):
            return [self.decoded(each) for each in header]
        if not isinstance(header, dict):
            return header
        ((kind, about),) = header.items()
        match kind:
            case "tuple":
                return tuple(self.decoded(each) for each in about)
            case "dict":
                return {key: self.decoded(each) for key, each in about}
            case "bytes":
                return self._next(about)
            case "tensor":
                name, shape, on_cpu = about
                dtype = dtype_of(name)
                flat = tensor_of(self._next(prod(shape) * dtype.itemsize))
                return flat.view(dtype).view(shape).to("cpu" if on_cpu else self._device)
            case _:
                name, shape = about
                kind = np.dtype(name)
                return np.frombuffer(self._next(prod(shape) * kind.itemsize), kind).reshape(shape).copy()

    def _next(self, length: int) -> bytes:
        begin, self._place = self._place, self._place + length
        return self._content[begin : self._place]
