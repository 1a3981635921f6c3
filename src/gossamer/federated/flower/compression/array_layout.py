"""Array layout: names and shapes of the arrays of a record that are compressed, as one flat tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.errors import LayoutError, MalformedError

Arrays = Mapping[str, npt.NDArray[Any]]
FLOATS = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ArrayLayout:
    """The arrays of the floating-point dtype that most numbers have, in the record's order.

    What else a record holds travels as it is: integers, and arrays without dimensions, such as BatchNorm's counts,
    which an averaging strategy makes floats of.
    """

    layout: Layout
    array_dtype: str  # of the arrays

    @classmethod
    def of(cls, arrays: Arrays) -> ArrayLayout:
        """Raises LayoutError where there is nothing to compress."""
        floats = {name: each for name, each in arrays.items() if _is_float(each.dtype) and each.ndim}
        numbers: Counter[str] = Counter()
        for each in floats.values():
            numbers[each.dtype.name] += each.size
        if not numbers:
            raise LayoutError(
                f"None of the arrays {sorted(arrays)[:5]} has floating-point numbers, so there is nothing to compress. "
                "Leave the mod and the strategy's wrapper out."
            )
        ((dtype, _),) = numbers.most_common(1)
        shapes = {name: tuple(each.shape) for name, each in floats.items() if each.dtype.name == dtype}
        return cls(Layout.of(shapes), dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat tensor: at least float32."""
        return accumulation_dtype(FLOATS[self.array_dtype])

    @property
    def is_exact(self) -> bool:
        """Whether a flat tensor, written to arrays and read again, is the same bits."""
        return FLOATS[self.array_dtype] == self.dtype

    def __contains__(self, name: object) -> bool:
        return name in self.layout.by_name

    def read(self, arrays: Arrays, whose: str) -> Tensor:
        """A copy of the arrays, (n,). Raises LayoutError where they are not such as this says."""
        packed = FlatTensors.zeros(self.layout, dtype=self.dtype, device=torch.device("cpu"))
        for name, view in packed.items():
            found = arrays.get(name)
            if found is None or found.shape != tuple(view.shape) or not _is_float(found.dtype):
                came = "is missing" if found is None else f"is {found.shape} of {found.dtype}"
                raise LayoutError(
                    f'{whose}: "{name}" {came}, and {tuple(view.shape)} of {self.array_dtype} was due, so there is '
                    "nothing to subtract it from. Return the arrays that came, trained: the same names and shapes."
                )
            view.copy_(torch.from_numpy(found))
        return packed.flat

    def write(self, flat: Tensor) -> dict[str, npt.NDArray[Any]]:
        """Arrays in memory of their own, of a flat tensor (n,)."""
        dtype = FLOATS[self.array_dtype]
        return {name: np.array(view.to(dtype).numpy()) for name, view in FlatTensors(flat, self.layout).items()}

    def fingerprint(self) -> str:
        return self.layout.fingerprint() + self.array_dtype

    def to_text(self) -> str:
        return msgspec.json.encode([self.array_dtype, [[slot.name, slot.shape] for slot in self.layout]]).decode()

    @classmethod
    def from_text(cls, text: str) -> ArrayLayout:
        """Raises MalformedError for what `to_text` did not write."""
        try:
            dtype, rows = msgspec.json.decode(text, type=tuple[str, list[tuple[str, tuple[int, ...]]]])
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedError(f"what a node kept of its arrays cannot be read: {error}") from error
        if dtype not in FLOATS:
            raise MalformedError(f"what a node kept of its arrays cannot be read: {dtype[:20]!r} is no dtype")
        return cls(Layout.of(dict(rows)), dtype)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in FLOATS and bool(dtype.isnative)
