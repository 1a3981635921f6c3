"""Limits: frames are bounded by the model, open files by what the system allows."""

from __future__ import annotations

import resource

import pytest
from torch import nn

from gossamer.federated.deployment import limits
from gossamer.federated.messages import cut
from gossamer.federated.model_state import ModelState


def test_honest_contributions_fit() -> None:
    state = ModelState.of(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 10)))
    dense = state.read(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 10))).flat
    part_bytes = 1000
    assert max(part.nbytes for part in cut((dense,), part_bytes)) < limits.accepted_frame_bytes(state, part_bytes)
    assert limits.accepted_frame_bytes(state, part_bytes) < limits.largest_frame_bytes(state)
    assert limits.largest_frame_bytes(state) >= 4 * dense.nbytes


def test_open_files_are_raised_as_far_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 3000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: set_to.append(both))
    assert limits.allow_open_files(100) == 100
    assert set_to == []
    assert limits.allow_open_files(2000) == 2000
    assert set_to == [(3000, 3000)]
    assert limits.allow_open_files(10_000) == 3000 - limits.OTHER_FILES
