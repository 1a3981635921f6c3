"""Objects: values of Python that travel between ranks as JSON and bytes, without pickles.

Allowed: None, bool, numbers, text, bytes, tensors, NumPy arrays and numbers, torch dtypes, devices and sizes,
argparse.Namespace, and lists, tuples, sets and dicts of them. Pickles could run code on arrival.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from gossamer.base.layout import dtype_of
from gossamer.horovod.basics import ProcessSet, context, global_process_set
from gossamer.horovod.calls import AllGatherCall, BroadcastBytesCall
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.train.session.named_values import tensor_of
from gossamer.train.session.world_calls import bytes_of, packed, unpacked

TAG = "horovod"  # marks a list that encodes another type


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank `root_rank`, on every rank of the set.

    Args:
        obj: numbers, text, None, bytes, arrays, and lists, tuples and dicts of them; ignored on other ranks.
        root_rank: rank in the job whose value is used.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.

    Raises:
        TypeError: for a type that does not travel, with the place of the value.
        HorovodInternalError: for a root that is not in the set.
    """
    here = context()
    if root_rank not in process_set.ranks:
        raise HorovodInternalError(f"root_rank {root_rank} is not in {process_set}. Name one of its ranks.")
    root = process_set.ranks.index(root_rank)
    content = tensor_of(encode(obj)) if here.rank == root_rank else tensor_of(b"")
    call = BroadcastBytesCall(tensors=(content,), root=root, finish=bytes_of)
    found = here.synchronize(here.submit(call, name, process_set))
    return obj if here.rank == root_rank else decode(found)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks of the set, by rank. Raises TypeError as `broadcast_object`.

    Args:
        obj: as for `broadcast_object`.
        name: matches calls of different ranks; without one they are matched by their order.
        process_set: the ranks of the call; all by default.
    """
    here = context()
    call = AllGatherCall(tensors=(tensor_of(encode(obj)),))
    ((content, sizes),) = here.synchronize(here.submit(call, None if name is None else f"{name}.object", process_set))
    return [decode(bytes_of(part)) for part in content.split(sizes)]


def encode(value: Any) -> bytes:
    """A value as bytes. Raises TypeError for a type that does not travel."""
    return packed(_plain(value, "object"), "broadcast_object")


def decode(content: bytes) -> Any:
    """The value of `encode`. Tensors are on the CPU."""
    return _rebuilt(unpacked(content, torch.device("cpu")))


def _plain(value: Any, place: str) -> Any:
    """The value in types that World's calls carry."""
    kind = type(value)
    if kind in (list, tuple):
        items = [_plain(each, f"{place}[{number}]") for number, each in enumerate(value)]
        return items if kind is list and not _is_tagged(items) else [TAG, kind.__name__, items]
    if kind in (set, frozenset):
        return [TAG, kind.__name__, [_plain(each, f"an entry of {place}") for each in sorted(value, key=repr)]]
    if kind in (dict, OrderedDict):
        pairs = [[_plain(key, f"a key of {place}"), _plain(each, f"{place}[{key!r}]")] for key, each in value.items()]
        return [TAG, kind.__name__, pairs]
    if kind is Namespace:
        return [TAG, "Namespace", _plain(vars(value), place)]
    if kind is complex:
        return [TAG, "complex", [value.real, value.imag]]
    if kind is torch.Size:
        return [TAG, "Size", list(value)]
    if kind in (torch.dtype, torch.device):
        return [TAG, kind.__name__, str(value).removeprefix("torch.")]
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        packed(value, "broadcast_object")
    except TypeError:
        raise TypeError(
            f"{place} is of type {kind.__module__}.{kind.__qualname__}, which does not travel between ranks: objects "
            "travel as JSON and bytes, since pickles could run code on arrival. Send its fields, for example "
            "hvd.broadcast_object(vars(value)) or dataclasses.asdict(value)."
        ) from None
    return value


def _is_tagged(items: list[Any]) -> bool:
    return bool(items) and isinstance(items[0], str) and items[0] == TAG  # an array compares by entries


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if not _is_tagged(value):
        return [_rebuilt(each) for each in value]
    _, kind, about = value
    match kind:
        case "dict" | "OrderedDict":
            pairs = [(_rebuilt(key), _rebuilt(each)) for key, each in about]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        case "list" | "tuple" | "set" | "frozenset":
            make: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return make(_rebuilt(each) for each in about)
        case "Namespace":
            return Namespace(**_rebuilt(about))
        case "complex":
            return complex(*about)
        case "Size":
            return torch.Size(about)
        case "dtype":
            if not isinstance(found := dtype_of(about), torch.dtype):
                raise ValueError(f"{about!r} is not a dtype of torch")
            return found
        case _:
            return torch.device(about)
