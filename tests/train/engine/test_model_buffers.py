"""Model buffers: which of them a step has moved, and which are averaged where workers train apart."""

from __future__ import annotations

import torch
from torch import nn

from gossamer.train.engine.model_buffers import BufferVersions, ModelBuffers


def test_a_buffer_that_is_replaced_twice_in_a_step_has_moved() -> None:
    """The second tensor may lie, and be known, where the first one did before."""
    model = nn.BatchNorm1d(3)
    versions = BufferVersions(ModelBuffers(model))
    for _ in range(10):
        versions.note()
        assert not versions.look()[1].any()
        for _ in range(2):
            model.running_mean = model.running_mean + 1
        assert versions.look()[1].tolist() == [True]


def test_numbers_and_single_whole_numbers_are_averaged_and_constants_and_masks_are_not() -> None:
    model = nn.Module()
    kinds = {
        "numbers": torch.zeros(2), "count": torch.tensor(3), "mask": torch.ones(2, dtype=torch.bool),
        "bound": torch.full((2,), -torch.inf), "wave": torch.zeros(1, dtype=torch.complex64),
    }  # fmt: skip
    for name, tensor in kinds.items():
        model.register_buffer(name, tensor)
    model.register_buffer("hidden", torch.zeros(1), persistent=False)
    model.register_buffer("later", None)
    averaged = ModelBuffers(model).averaged()
    assert list(averaged) == ["numbers", "hidden", "count"]
    assert averaged["count"] is model.count


def test_names_are_those_of_the_model_without_the_compiler_s() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_module("_orig_mod", nn.BatchNorm1d(2))
    names = [name for name in ModelBuffers(model).averaged() if name.endswith("running_mean")]
    assert names == ["0.running_mean", "running_mean"]
