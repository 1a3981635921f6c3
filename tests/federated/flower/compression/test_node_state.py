"""Node state: feedback moves on with what was counted, and survives being written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.errors import MalformedError
from gossamer.federated.flower.arrays import ArrayLayout
from gossamer.federated.flower.codec import KeptNote, NodeState
from gossamer.federated.flower.records import NodeInvitation

BEFORE, AFTER = ({"residual": torch.zeros(3)},), ({"residual": torch.ones(3)},)
STATE = NodeState(KeptNote(run="r", recipe="c", step=4, version=2), BEFORE, AFTER, (torch.arange(3.0),))


def told(**changed: object) -> NodeInvitation:
    return NodeInvitation(**{"run": "r", "recipe": "c", "step": 5, "counted": 4} | changed)  # type: ignore[arg-type]


def test_feedback_moves_on_with_what_was_counted() -> None:
    assert STATE.for_invitation(told()).before is AFTER
    assert STATE.for_invitation(told(counted=3)).before is BEFORE
    assert STATE.for_invitation(told(counted=-1)).before is BEFORE
    settled = STATE.for_invitation(told())
    assert (settled.after, settled.note.step) == ((), -1)
    assert settled.for_invitation(told(step=6, counted=4)).before is AFTER  # not settled twice


def test_evaluation_settles_nothing() -> None:
    assert STATE.for_invitation(told(step=-1)) is STATE


def test_another_run_or_recipe_begins_anew() -> None:
    for other in (told(run="s"), told(recipe="d")):
        assert STATE.for_invitation(other) == NodeState(KeptNote(run=other.run, recipe=other.recipe))


def test_feedback_of_other_arrays_is_dropped() -> None:
    layout = ArrayLayout.of({"w": np.zeros(3)})
    first = STATE.holding(told(pull="p", version=3), layout, ("w",), torch.zeros(3))
    assert (first.before, first.note.version, len(first.replica)) == ((), 3, 1)
    kept = NodeState(first.note, BEFORE).holding(told(), layout, ("w",), torch.zeros(3))
    assert (kept.before, kept.note.version, kept.replica) == (BEFORE, -1, ())


def test_what_is_written_is_read() -> None:
    found = NodeState.from_bytes(*STATE.to_bytes())
    assert found.note == STATE.note
    for mine, theirs in ((found.before, BEFORE), (found.after, AFTER)):
        assert [list(block) for block in mine] == [list(block) for block in theirs]
        assert torch.equal(mine[0]["residual"], theirs[0]["residual"])
    assert torch.equal(found.replica[0], STATE.replica[0])
    assert NodeState.from_bytes(*NodeState().to_bytes()) == NodeState()


def test_damage_is_refused() -> None:
    text, arrays = STATE.to_bytes()
    with pytest.raises(MalformedError):
        NodeState.from_bytes(text[:-1], arrays)
    with pytest.raises(MalformedError):
        NodeState.from_bytes(text, arrays | {"after": arrays["after"][:-1]})
    with pytest.raises(MalformedError):
        NodeState.from_bytes(text, arrays | {"after": arrays["replica"]})
