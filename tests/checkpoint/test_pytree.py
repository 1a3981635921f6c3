"""Pytrees of plain values and tensors: flattened and rebuilt."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.checkpoint import digest, flatten, unflatten
from gossamer.errors import CheckpointError

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
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(trees)
def test_a_tree_survives(tree):
    assert alike(unflatten(*flatten(tree)), tree)


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), ((1,), [1]), ({1: 0}, {"1": 0}), (1, 1.0)])
def test_the_comparison_tells_apart_what_looks_alike(a, b):
    assert not alike(a, b)
    assert alike(a, a)


def test_tensors_are_not_copied_and_named_by_their_place():
    weight = torch.ones(2)
    _, tensors = flatten({"model": {"fc.weight": weight}, "steps": [weight, 3]})
    assert list(tensors) == ["model.fc.weight", "steps.0"]
    assert tensors["steps.0"] is weight


def test_places_that_read_alike_stay_apart():
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2)}
    text, tensors = flatten(tree)
    assert len(tensors) == 3
    assert "__metadata__" not in tensors
    assert alike(unflatten(text, tensors), tree)


def test_what_has_a_state_dict_is_replaced_by_it():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    tree = unflatten(*flatten({"model": model, "scheduler": scheduler}))
    assert alike(tree["model"], dict(model.state_dict()))
    assert alike(tree["scheduler"], scheduler.state_dict())


class Annealing:
    def state_dict(self):
        return {"anneal": math.cos}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"scheduler": Annealing()}, r"scheduler\.anneal is a builtin_function_or_method"),
        ({"mine": [1, {2, 3}]}, r"mine\.1 is a set"),
        (b"bytes", "The tree is a bytes"),
        ({"a": {1.5: 0}}, "a has the key 1.5, a float"),
        ({"x": torch.eye(2).to_sparse()}, r"x is a tensor without plain memory.*to_dense"),
        ({"x": torch.ones(2, device="meta")}, "x is a tensor without plain memory"),
    ],
)
def test_anything_else_is_refused_by_its_place(tree, message):
    with pytest.raises(CheckpointError, match=message):
        flatten(tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_are_of_bits(dtype):
    x = torch.tensor([[0, 1, 2, 3], [0, 5, 6, 0]]).to(dtype)
    same = x.t().contiguous().t()
    assert not same.is_contiguous()
    assert digest([x]) == digest([same]) == digest([x[:1], x[1:]])
    assert digest([x]) != digest([x.t()])
    assert digest([torch.tensor(1).to(dtype)]) != digest([torch.tensor(0).to(dtype)])


def test_digests_tell_signed_zeros_apart_and_see_conjugation():
    assert digest([torch.tensor(0.0)]) != digest([torch.tensor(-0.0)])
    z = torch.tensor([1 + 2j])
    assert digest([z.conj()]) == digest([torch.tensor([1 - 2j])]) != digest([z])
    assert digest([z.requires_grad_()]) == digest([z.detach()])


def test_digests_read_large_tensors_in_pieces(monkeypatch):
    x = torch.arange(1000.0)
    whole = digest([x])
    monkeypatch.setattr(sys.modules["gossamer.checkpoint.pytree"], "CHUNK_BYTES", 7)
    assert digest([x]) == whole
