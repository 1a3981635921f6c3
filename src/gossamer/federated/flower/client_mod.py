"""Client mod: compresses the update of a ClientApp, and decompresses the model that the server sent."""

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

Mod = Callable[[Any, Any, Any], Any]  # (Message, Context, next handler) -> Message
TRAIN = "train"  # prefix of the type of training messages
KEPT = "gossamer.kept"  # name of the arrays among a node's records


def compression_mod(recipe: str | None = None) -> Mod:
    """Make a mod for `ClientApp(mods=[...])`, for an app with a ServerApp that uses CompressedStrategy.

    The mod compares the arrays that the app returns with the model that it received, and sends the compressed
    difference. The compression error stays in the state of the node's Context and is added to its next difference
    (error feedback). Put the mod first in the list, so that other mods see plain arrays.

    Args:
        recipe: a compressor, such as "TopK(0.01)"; None: the compressor of the server's CompressedStrategy.

    Returns:
        The mod, called as mod(message, context, call_next).

    Raises:
        RecipeError: the recipe is not a compressor that nodes can use.
        FlowerMissing: Flower is not installed or too old.

    Example:
        app = ClientApp(client_fn=client_fn, mods=[gossamer.federated.flower.compression_mod("TopK(0.01)")])
    """
    need_flower()
    own = None if recipe is None else ContributionCodec.of(recipe).text

    def compress(message: Any, context: Any, call_next: Any) -> Any:
        invitation = _invitation(message)
        if invitation is None:
            return call_next(message, context)
        if own is not None and own != invitation.recipe:
            raise MismatchError(
                f"this node compresses by {own}, but the server's strategy expects {invitation.recipe}. Give "
                "compression_mod() and CompressedStrategy() the same recipe, or write compression_mod()."
            )
        state = loaded(context).for_invitation(invitation)
        state, layout, given = _given(invitation, state, message)
        reply = call_next(message, context)
        if not reply.has_error():
            if invitation.step >= 0:
                state = _compressed(invitation, state, reply, layout, given, message.metadata.dst_node_id)
            answer = NodeAnswer(run=invitation.run, step=invitation.step, held=state.note.version)
            reply.content[RECORD] = note_record(encode(answer))
        _save(context, state)
        return reply

    return compress


def _invitation(message: Any) -> NodeInvitation | None:
    """Remove the wrapper's note from the message, so that the app sees the message of its strategy.

    Raises LoopError for a training message without a note."""
    if message.has_content() and RECORD in message.content.config_records:
        text = message.content[RECORD].get(NOTE)
        del message.content[RECORD]
        return from_text(text, NodeInvitation, "the server")
    if message.metadata.message_type.partition(".")[0] == TRAIN:
        raise LoopError(
            "compression_mod() received a training message from a strategy that does not read compressed "
            'contributions. In the ServerApp write strategy = CompressedStrategy(FedAvg(...), "TopK(0.01)"), or leave '
            "the mod out."
        )
    return None


def _given(invitation: NodeInvitation, state: NodeState, message: Any) -> tuple[NodeState, ArrayLayout, Tensor]:
    """The state with the received model, its layout, and its values (n,). The message then has plain arrays."""
    name, record = only_record(message.content, "a message to a node")
    came = numpy_arrays(record, "a message to a node")
    if not has_payload(record):
        layout = ArrayLayout.of(came)
        flat = layout.read(came, "a message to a node")
        return state.holding(invitation, layout, tuple(came), flat), layout, flat
    if not state.replica:
        raise MalformedError(
            "the message has a difference, but this node holds no version of the model: its state was lost. Nothing "
            "was trained; the next message has the whole model"
        )
    layout = ArrayLayout.from_text(state.note.arrays)
    codec = PullCodec.of(invitation.pull, invitation.seed)
    version, flat = brought(codec, layout, state.replica, state.note.version, payload_of(record, "a message to a node"))
    arrays = layout.write(flat) | came
    message.content[name] = array_record({each: arrays[each] for each in state.note.names})
    note = msgspec.structs.replace(state.note, version=version)
    return replace(state, note=note, replica=(flat,)), layout, flat


def _compressed(
    invitation: NodeInvitation, state: NodeState, reply: Any, layout: ArrayLayout, given: Tensor, node: int
) -> NodeState:
    """Replace the reply's arrays by the contribution. Returns the state once the contribution is counted."""
    name, record = only_record(reply.content, "the ClientApp's reply")
    arrays = numpy_arrays(record, "the ClientApp's reply")
    difference = given - layout.read(arrays, "the ClientApp's reply")
    codec = ContributionCodec.of(invitation.recipe, invitation.seed)
    data, unsent = codec.encode(difference, layout, state.before, node, invitation.step)
    others = {key: record[key] for key in arrays if key not in layout}
    reply.content[name] = array_record({PAYLOAD: payload_array(codec.stype, data)} | others)
    return replace(state, note=msgspec.structs.replace(state.note, step=invitation.step), after=unsent)


def loaded(context: Any) -> NodeState:
    """The node's state from its Context. Raises MalformedError."""
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
