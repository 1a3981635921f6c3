"""Pytrees drawn by hypothesis, and when two are alike."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from gossamer.train.checkpoint import digest

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.float8_e4m3fn,
]


def bits(tensor):
    return (tensor.dtype, tuple(tensor.shape), digest([tensor]))


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(draw(st.lists(st.integers(0, 255), min_size=count, max_size=count)), dtype=torch.uint8)
    if dtype == torch.bool:
        return raw.reshape(shape) > 127
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.mT if len(shape) > 1 and draw(st.booleans()) else tensor


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1 + 0.2])
    | st.text()
    | tensors()
)
keys = st.text() | st.integers(-5, 5) | st.sampled_from(["a.b", "tensor", "dict", "float", "__metadata__"])


def alike(a, b):
    """Equal in value, type and bits: -0.0 is not 0.0, 1 is not True, a tuple is no list, nan is nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bits(a) == bits(b)
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(x) is type(y) and alike(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
