"""Memory traffic of kernels that Triton's interpreter runs: how often they read and write each entry of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


class Traffic:
    """(numel,) counts for a tensor, which must live as long."""

    def __init__(self, tensor: Tensor) -> None:
        self._first, self._itemsize = tensor.data_ptr(), tensor.itemsize
        self.reads, self.writes = np.zeros((2, tensor.numel()), dtype=np.int64)

    def count(self, counts: np.ndarray, addresses: np.ndarray) -> None:
        index = (addresses.astype(np.int64) - self._first) // self._itemsize
        np.add.at(counts, index[(index >= 0) & (index < len(counts))], 1)


@contextmanager
def counted(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Traffic]]:
    """What kernels do to each of these tensors, none of which share memory, within the block."""
    found = {name: Traffic(tensor) for name, tensor in tensors.items()}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        for traffic in found.values():
            traffic.count(traffic.reads, pointers.data[mask.data.astype(bool)])
        return load(self, pointers, mask, *rest)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        for traffic in found.values():
            traffic.count(traffic.writes, pointers.data[mask.data.astype(bool)])
        return store(self, pointers, value, mask, *rest)

    with patch.multiple(InterpreterBuilder, create_masked_load=counting_load, create_masked_store=counting_store):
        yield found
