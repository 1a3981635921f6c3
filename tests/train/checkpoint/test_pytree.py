"""Pytrees of plain values and tensors: flattened and rebuilt."""

import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from support.pytrees import DTYPES, alike, trees

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint import digest, flatten, unflatten


@given(trees)
def test_a_tree_survives(tree):
    assert alike(unflatten(*flatten(tree)), tree)


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), ((1,), [1]), ({1: 0}, {"1": 0}), (1, 1.0)])
def test_the_comparison_tells_apart_what_looks_alike(a, b):
    assert not alike(a, b)
    assert alike(a, a)


def test_a_counter_stays_one():
    found = unflatten(*flatten({"milestones": Counter([3, 3, 5]), "named": Counter("aab")}))
    assert [type(each) for each in found.values()] == [Counter, Counter]
    assert sorted(found["milestones"].elements()) == [3, 3, 5]
    assert found["named"] == Counter(a=2, b=1)


def test_tensors_are_not_copied_and_named_by_their_place():
    weight = torch.ones(2)
    _, tensors = flatten({"model": {"fc.weight": weight}, "steps": [weight, 3]})
    assert list(tensors) == ["model.fc.weight", "steps.0"]
    assert tensors["steps.0"] is weight


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4).permute(1, 2, 0),
        torch.randn(3, 1, 5, dtype=torch.bfloat16).mT,
        torch.randn(0, 3).t(),
    ],
)
def test_the_order_of_dimensions_in_memory_survives(tensor):
    text, tensors = flatten([tensor])
    (found,) = unflatten(text, {name: each.contiguous() for name, each in tensors.items()})
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    assert found.is_contiguous() == tensor.is_contiguous()
    if not tensor.is_contiguous():
        assert found.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor", [torch.randn(4, 6)[:, ::2], torch.randn(3, 1).expand(3, 4), torch.randn(6)[::2], torch.randn(3)[1::2]]
)
def test_tensors_with_gaps_are_read_without_them(tensor):
    text, tensors = flatten([tensor])
    (found,) = unflatten(text, {name: each.contiguous() for name, each in tensors.items()})
    assert torch.equal(found, tensor)
    assert found.is_contiguous()


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
    monkeypatch.setattr(sys.modules["gossamer.train.checkpoint.pytree"], "CHUNK_BYTES", 7)
    assert digest([x]) == whole


def test_what_holds_itself_or_is_too_deep_is_named() -> None:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    deep: Any = 0
    for _ in range(5000):
        deep = {"next": deep}
    for tree in (holds_itself, deep):
        with pytest.raises(CheckpointError, match="contains itself, or is nested too deeply"):
            flatten(tree)


def test_numpys_scalars_are_numbers() -> None:
    text, _ = flatten({"loss": np.float32(0.5), "step": np.int64(3), "best": np.bool_(True)})
    assert unflatten(text, {}) == {"loss": 0.5, "step": 3, "best": True}
    with pytest.raises(CheckpointError, match=r"torch\.from_numpy\(array\)"):
        flatten({"weights": np.ones(3)})
