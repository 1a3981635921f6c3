"""Client mod: compresses what a ClientApp learned, and hands it the model whole, however that travelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from gossamer.errors import LoopError, MalformedError, MismatchError
from gossamer.federated.flower.arrays import ArrayLayout
from gossamer.federated.flower.codec import STYPE, ContributionCodec, NodeState, PullCodec, brought
from gossamer.federated.flower.records import (
    NOTE,
    PAYLOAD,
    RECORD,
    NodeAnswer,
    NodeInvitation,
    array_record,
    from_text,
    has_payload,
    need_flower,
    note_record,
    numpy_arrays,
    only_record,
    payload_array,
    payload_of,
)
from gossamer.federated.messages import encode

Mod = Callable[[Any, Any, Any], Any]  # (Message, Context, what comes next) -> Message
TRAIN = "train"  # what the type of a message that asks for training begins with
KEPT = "gossamer.kept"  # of the arrays, among a node's records


def compression_mod(recipe: str | None = None) -> Mod:
    """A mod for `ClientApp(mods=[...])`, for an app whose ServerApp wraps its strategy in CompressedStrategy.

    recipe: a compressor, as "TopK(0.01)"; None: whatever the wrapper asks for. What the app returns is compared with
    the model that it was given, and the difference travels compressed; what that loses is added to the node's next
    difference, and until then lies in the state of its Context. Put it first among mods: the others then see arrays as
    they know them. Raises RecipeError for what is no compressor, FlowerMissing without Flower.
    """
    need_flower()
    own = None if recipe is None else ContributionCodec.of(recipe).text

    def compress(message: Any, context: Any, call_next: Any) -> Any:
        told = _invitation(message)
        if told is None:
            return call_next(message, context)
        if own is not None and own != told.recipe:
            raise MismatchError(
                f"this node compresses by {own} and the server's strategy reads {told.recipe}. Give compression_mod() "
                "and CompressedStrategy() the same recipe, or write compression_mod()."
            )
        state = loaded(context).for_invitation(told)
        state, layout, given = _given(told, state, message)
        reply = call_next(message, context)
        if not reply.has_error():
            if told.step >= 0:
                state = _compressed(told, state, reply, layout, given, message.metadata.dst_node_id)
            answer = NodeAnswer(run=told.run, step=told.step, held=state.note.version)
            reply.content[RECORD] = note_record(encode(answer))
        _save(context, state)
        return reply

    return compress


def _invitation(message: Any) -> NodeInvitation | None:
    """What the wrapper wrote, taken out of the message, so that the app sees what its strategy sent.

    Raises LoopError where training was asked for without."""
    if message.has_content() and RECORD in message.content.config_records:
        text = message.content[RECORD].get(NOTE)
        del message.content[RECORD]
        return from_text(text, NodeInvitation, "the server")
    if message.metadata.message_type.partition(".")[0] == TRAIN:
        raise LoopError(
            "compression_mod() was asked to train by a strategy that reads no compressed contributions, so nothing "
            'would be saved. In the ServerApp write strategy = CompressedStrategy(FedAvg(...), "TopK(0.01)"), or leave '
            "the mod out."
        )
    return None


def _given(told: NodeInvitation, state: NodeState, message: Any) -> tuple[NodeState, ArrayLayout, Tensor]:
    """The state with the model that came, its layout, and itself: (n,). The message then holds it as plain arrays."""
    name, record = only_record(message.content, "a message to a node")
    came = numpy_arrays(record, "a message to a node")
    if not has_payload(record):
        layout = ArrayLayout.of(came)
        flat = layout.read(came, "a message to a node")
        return state.holding(told, layout, tuple(came), flat), layout, flat
    if not state.replica:
        raise MalformedError(
            "a difference came, and this node holds no version of the model any more: its state was lost. Nothing was "
            "trained; the next message brings the whole model"
        )
    layout = ArrayLayout.from_text(state.note.arrays)
    codec = PullCodec.of(told.pull, told.seed)
    version, flat = brought(codec, layout, state.replica, state.note.version, payload_of(record, "a message to a node"))
    arrays = layout.write(flat) | came
    message.content[name] = array_record({each: arrays[each] for each in state.note.names})
    note = msgspec.structs.replace(state.note, version=version)
    return replace(state, note=note, replica=(flat,)), layout, flat


def _compressed(
    told: NodeInvitation, state: NodeState, reply: Any, layout: ArrayLayout, given: Tensor, node: int
) -> NodeState:
    """The state once the contribution counted, which the reply then holds instead of arrays."""
    name, record = only_record(reply.content, "what the ClientApp returned")
    arrays = numpy_arrays(record, "what the ClientApp returned")
    difference = given - layout.read(arrays, "what the ClientApp returned")
    codec = ContributionCodec.of(told.recipe, told.seed)
    data, owed = codec.encode(difference, layout, state.before, node, told.step)
    others = {key: record[key] for key in arrays if key not in layout}
    reply.content[name] = array_record({PAYLOAD: payload_array(codec.stype, data)} | others)
    return replace(state, note=msgspec.structs.replace(state.note, step=told.step), after=owed)


def loaded(context: Any) -> NodeState:
    """What a node keeps in the state of its Context. Raises MalformedError."""
    if RECORD not in context.state.config_records:
        return NodeState()
    arrays = context.state[KEPT] if KEPT in context.state.array_records else {}
    return NodeState.from_bytes(
        str(context.state[RECORD][NOTE]), {name: bytes(array.data) for name, array in arrays.items()}
    )


def _save(context: Any, state: NodeState) -> None:
    text, arrays = state.to_bytes()
    context.state[RECORD] = note_record(text)
    context.state[KEPT] = array_record({name: payload_array(STYPE, data) for name, data in arrays.items()})
