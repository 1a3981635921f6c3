"""Snapshots: copies of what is, in memory that is used again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from support.pytrees import alike, trees

from gossamer.train.checkpoint import unflatten
from gossamer.train.checkpoint.snapshot import SnapshotBuffers


@settings(max_examples=50, deadline=None)
@given(trees, trees)
def test_a_copy_is_the_tree(one, other):
    buffers = SnapshotBuffers()
    for tree in (one, other, one):
        flat = buffers.copy(tree)
        assert alike(unflatten(flat.text, flat.tensors), tree)


def places(buffers, tree):
    return {name: copied.data_ptr() for name, copied in buffers.copy(tree).tensors.items()}


def check_used_again(buffers):
    tree = {"a": torch.ones(3), "b": [torch.zeros(2, 2, dtype=torch.int64)]}
    before = places(buffers, tree)
    tree["a"].add_(1)
    assert places(buffers, tree) == before
    grown = places(buffers, {"a": torch.ones(4), "b": tree["b"]})
    assert (grown["a"], grown["b.0"] == before["b.0"]) != (before["a"], False)
    assert grown["b.0"] == before["b.0"]


def test_memory_is_used_again():
    check_used_again(SnapshotBuffers())


class Forgetful(SnapshotBuffers):
    def __init__(self):
        super().__init__()
        self.kept = []

    def copy(self, tree):
        flat = super().copy(tree)
        self.kept.append(flat)
        self._buffers = {}
        return flat


def test_new_memory_is_found():
    with pytest.raises(AssertionError):
        check_used_again(Forgetful())


def test_copies_share_nothing_with_what_was_copied():
    tree = {"a": torch.ones(3), "view": torch.ones(4).expand(2, 4)}
    flat = SnapshotBuffers().copy(tree)
    tree["a"].zero_()
    assert torch.equal(flat.tensors["a"], torch.ones(3))
    assert flat.tensors["view"].is_contiguous()
