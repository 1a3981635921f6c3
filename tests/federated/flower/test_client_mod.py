"""Client mod: only what was asked for is compressed, and a node's state moves on with what it sent."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from support.flower_apps import first_arrays, linear_app

from gossamer.errors import LoopError, MalformedError, RecipeError
from gossamer.federated.flower import VirtualGrid, compression_mod
from gossamer.federated.flower.client_mod import loaded
from gossamer.federated.flower.codec import ContributionCodec
from gossamer.federated.flower.messages import identify_this_process
from gossamer.federated.flower.records import (
    NOTE,
    PAYLOAD,
    RECORD,
    NodeAnswer,
    NodeInvitation,
    from_text,
    note_record,
    payload_array,
)
from gossamer.federated.messages import encode

identify_this_process()
APP = linear_app()
RECIPE = ContributionCodec.of("TopK(0.5)").text


def context() -> Context:
    return Context(run_id=1, node_id=1000, node_config={"partition-id": 0}, state=RecordDict(), run_config={})


def invited(kind: str = "train", **told: Any) -> Message:
    note = note_record(encode(NodeInvitation(**{"run": "r", "recipe": RECIPE, "step": 0} | told)))
    return Message(RecordDict({"arrays": first_arrays(), RECORD: note}), 1000, kind)


def test_a_contribution_leaves_as_a_payload_and_its_feedback_stays() -> None:
    own, reply = context(), compression_mod("TopK(0.5)")(invited(), here := context(), APP)
    assert list(reply.content["arrays"]) == [PAYLOAD]
    assert reply.content["arrays"][PAYLOAD].stype == "gossamer.topk.v1"
    assert from_text(reply.content[RECORD][NOTE], NodeAnswer, "it") == NodeAnswer(run="r", step=0)
    assert loaded(here).note.step == 0
    assert loaded(own).note.step == -1


def test_messages_that_nobody_wrapped_pass() -> None:
    grid = VirtualGrid(linear_app([compression_mod()]), 1)
    (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": first_arrays()}), 1000, "evaluate")])
    assert set(reply.content) == {"metrics"}
    with pytest.raises(LoopError, match="CompressedStrategy"):
        compression_mod()(Message(RecordDict({"arrays": first_arrays()}), 1000, "train"), context(), APP)


def test_an_apps_error_leaves_feedback_as_it_was() -> None:
    here, mod = context(), compression_mod()
    mod(invited(), here, APP)
    reply = mod(invited(step=1, counted=0), here, lambda message, _: Message(Error(1, "full"), reply_to=message))
    assert reply.error.reason == "full"
    kept = loaded(here)
    assert kept.note.step == -1
    assert len(kept.before) == 1


def test_evaluation_is_answered_whole() -> None:
    reply = compression_mod()(invited("evaluate", step=-1), here := context(), APP)
    assert isinstance(reply.content["metrics"], MetricRecord)
    assert loaded(here).note.step == -1


def test_differences_to_what_is_not_held_and_damaged_notes_are_refused() -> None:
    message = invited(pull="Int8()")
    message.content["arrays"]["gossamer"] = payload_array("gossamer.int8.v1", b"abc")
    with pytest.raises(MalformedError, match="holds no version"):
        compression_mod()(message, context(), APP)
    damaged = invited()
    damaged.content[RECORD] = note_record("{")
    with pytest.raises(MalformedError, match="the server sent an invalid NodeInvitation"):
        compression_mod()(damaged, context(), APP)
    with pytest.raises(RecipeError):
        compression_mod()(invited(recipe="__import__('os')"), context(), APP)
