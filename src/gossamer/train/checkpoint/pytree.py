"""Pytree: flattens a tree of plain values and tensors into JSON and named tensors, and digests tensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.base.json_text import read_json
from gossamer.base.layout import bytes_of, dtype_name, dtype_of
from gossamer.errors import CheckpointError

CHUNK_BYTES = 1 << 24
DIGEST_BYTES = 16
DEEPEST_LEVELS = 60  # of a tree; each is up to three levels of its JSON, and at most 200 of those are read
# Supported by every release of safetensors; other dtypes are stored as bytes, with their name in the tree.
FORMAT_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def flat_bytes(tensor: Tensor) -> Tensor:
    """The elements in row-major order as uint8, (nbytes,), without a copy if the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes_of(plain)


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    for chunk in flat_bytes(tensor).split(CHUNK_BYTES):
        yield memoryview(chunk.cpu().numpy())


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the concatenated bytes of the tensors."""
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        for chunk in chunks(tensor):
            running.update(chunk)
    return running.hexdigest()


class _Writer:
    """Encodes a tree as JSON, and collects its tensors by name.

    None, bool, int, str, finite floats and lists are encoded as themselves; every other value is an object with its
    kind as the first key.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._level = 0

    def encode(self, value: Any, path: str) -> Any:
        if self._level == DEEPEST_LEVELS:
            raise CheckpointError(
                f"The tree contains itself, or is nested too deeply: more than {DEEPEST_LEVELS} levels at "
                f"{path[:100]}. Save flat lists and dicts of numbers, text and tensors."
            )
        self._level += 1
        encoded = self._encoded(value, path)
        self._level -= 1
        return encoded

    def _encoded(self, value: Any, path: str) -> Any:
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return value if math.isfinite(value) else {"float": repr(float(value))}
            case Tensor():
                return self._tensor(value, path)
            case dict():
                kind = "counter" if isinstance(value, Counter) else "dict"  # milestones of MultiStepLR
                return {kind: [[self._key(key, path), self._at(item, path, key)] for key, item in value.items()]}
            case tuple():
                return {"tuple": self._items(value, path)}
            case list():
                return self._items(value, path)
            case np.generic():
                return self.encode(value.item(), path)
            case _ if callable(getattr(value, "state_dict", None)):
                return self.encode(value.state_dict(), path)
        raise CheckpointError(
            f"{path or 'The tree'} is a {type(value).__qualname__}, which cannot be stored without pickle. Save "
            "numbers, text, tensors, lists, tuples, dicts, or objects with state_dict(), NumPy's arrays as "
            "torch.from_numpy(array); leave the rest out."
        )

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self._at(item, path, index) for index, item in enumerate(values)]

    def _at(self, item: Any, path: str, key: object) -> Any:
        return self.encode(item, f"{path}.{key}" if path else str(key))

    def _key(self, key: object, path: str) -> object:
        if not isinstance(key, str | int):
            raise CheckpointError(
                f"{path or 'The tree'} has the key {key!r}, a {type(key).__qualname__}. Keys of a checkpoint are "
                "str or int: rename it."
            )
        return key

    def _tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise CheckpointError(
                f"{path} is a tensor without plain memory ({tensor.layout}, {tensor.device}), which the format does "
                "not support. Save tensor.to_dense(), or leave it out."
            )
        name = path.encode("ascii", "backslashreplace").decode() or "tensor"
        while name in self.tensors or name == "__metadata__":
            name += "'"
        if tensor.dtype in FORMAT_DTYPES:
            self.tensors[name] = tensor
            order = _memory_order(tensor)
            return {"tensor": name} if order is None else {"tensor": name, "order": order}
        self.tensors[name] = flat_bytes(tensor)
        return {"bytes": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def _memory_order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the largest stride to the smallest, if these elements without gaps are not in row-major
    order, such as channels_last. Files have row-major order; an optimizer computes other bits, and more slowly, on
    state with other strides than its parameter's."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _reordered(tensor: Tensor, order: list[int]) -> Tensor:
    return torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    match node:
        case list():
            return [_decode(item, tensors) for item in node]
        case {"dict": pairs}:
            return {key: _decode(item, tensors) for key, item in pairs}
        case {"counter": pairs}:
            return Counter({key: _decode(item, tensors) for key, item in pairs})
        case {"tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case {"float": text}:
            return float(text)
        case {"tensor": name, "order": order}:
            return _reordered(tensors[name], order)
        case {"tensor": name}:
            return tensors[name]
        case {"bytes": name, "dtype": dtype, "shape": shape}:
            return tensors[name].view(dtype_of(dtype)).reshape(shape)
        case _:
            return node


def flatten(tree: Any) -> tuple[str, dict[str, Tensor]]:
    """Convert a tree to JSON and its tensors by name; the tensors are not copied.

    Args:
        tree: nested dicts and Counters (str or int keys), lists and tuples of None, bool, int, float, str and tensors;
            objects with state_dict() are replaced by its result.

    Raises:
        CheckpointError: another value is in the tree; the message names its place.
    """
    writer = _Writer()
    text = json.dumps(writer.encode(tree, ""))
    return text, writer.tensors


def unflatten(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    return _decode(read_json(text), tensors)
