"""Compressed strategy: wraps a Flower strategy, which sees plain arrays while messages are compressed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from gossamer.base.kernels import all_finite
from gossamer.errors import GossamerError, MalformedError
from gossamer.federated.flower.arrays import ArrayLayout
from gossamer.federated.flower.codec import ContributionCodec, PullCodec, Versions
from gossamer.federated.flower.records import (
    NOTE,
    PAYLOAD,
    RECORD,
    NodeAnswer,
    NodeInvitation,
    RoundTraffic,
    array_record,
    from_text,
    has_payload,
    note_record,
    numpy_arrays,
    only_record,
    payload_array,
    payload_of,
    record_bytes,
)
from gossamer.federated.messages import encode

log = logging.getLogger(__name__)


NUMBERS = "biuf"  # kinds of dtypes that a strategy can average
MOST_SAMPLES = 1e9  # largest weight of one node


@dataclass(frozen=True)
class ModelSent:
    """The model in a round's messages."""

    name: str  # of its ArrayRecord
    record: ArrayRecord
    arrays: dict[str, Any]  # by name, all of them
    layout: ArrayLayout
    flat: Tensor  # (n,)

    @classmethod
    def of(cls, message: Message) -> ModelSent:
        """Raises LoopError for a message with several ArrayRecords."""
        name, record = only_record(message.content, "a strategy's message")
        arrays = numpy_arrays(record, "a strategy's message")
        layout = ArrayLayout.of(arrays)
        return cls(name, record, arrays, layout, layout.read(arrays, "a strategy's message"))


@dataclass
class KnownNode:
    """The server's knowledge of a node."""

    held: int = -1  # the version that it reported to hold
    counted: int = -1  # the step of its last contribution that was counted


class CompressedStrategy(Strategy):  # type: ignore[misc]  # Flower is not installed for type checks
    """Wrap a Flower strategy, for ClientApps with `compression_mod`.

    Nodes send compressed differences to the model that they received, with error feedback. The wrapped strategy
    receives the model minus the decoded difference. With `pull`, a node with an earlier version receives a compressed
    difference between versions, and trains from the decoded model. Nodes without the mod send and receive plain arrays.
    Invalid contributions are logged and left out, and the round continues. Use this as the outermost wrapper.

    Args:
        strategy: the strategy to wrap.
        recipe: a compressor, such as "TopK(0.01)".
        pull: a compressor of the differences between versions; None: nodes receive the whole model.
        seed: of the compressors.

    Attributes:
        traffic: bytes of each round.
        refused: reasons of unused contributions, by round and node.

    Raises:
        RecipeError: a recipe is not a compressor that nodes can use.

    Example:
        strategy = CompressedStrategy(FedAvg(), "TopK(0.01)", pull="Int8()")
        result = strategy.start(grid, first_arrays, num_rounds=10)
    """

    def __init__(self, strategy: Strategy, recipe: str, *, pull: str | None = None, seed: int = 0) -> None:
        self.strategy = strategy
        self.codec = ContributionCodec.of(recipe, seed)
        self.pull = None if pull is None else PullCodec.of(pull, seed)
        self.traffic: list[RoundTraffic] = []
        self.refused: list[dict[int, str]] = []  # reasons of unused contributions, by round and node
        self._run = secrets.token_hex(8)
        self._nodes: dict[int, KnownNode] = {}
        self._asked: dict[int, tuple[ModelSent, Tensor]] = {}  # pending nodes: the model, and the values they received
        self._versions: Versions | None = None
        self._step = -1

    def summary(self) -> None:
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._open_round()
        self._step += 1
        self._asked = {}
        messages = self.strategy.configure_train(server_round, arrays, config, grid)
        return self._sent(messages, arrays, self._step)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        taken = [reply for reply in replies if self._taken(reply)]
        arrays, metrics = self.strategy.aggregate_train(server_round, taken)
        if arrays is not None:
            for reply in taken:
                if not reply.has_error():
                    self._node(reply.metadata.src_node_id).counted = self._step
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.traffic:
            self._open_round()
        return self._sent(self.strategy.configure_evaluate(server_round, arrays, config, grid), arrays, -1)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        kept = list(replies)
        for reply in kept:
            try:
                self._noted(reply)
            except MalformedError as error:
                self._refuse(reply.metadata.src_node_id, error)
        return self.strategy.aggregate_evaluate(server_round, kept)

    def _open_round(self) -> None:
        self.traffic.append(RoundTraffic())
        self.refused.append({})

    def _node(self, number: int) -> KnownNode:
        return self._nodes.setdefault(number, KnownNode())

    # From the server to nodes.

    def _sent(self, messages: Iterable[Message], arrays: ArrayRecord, step: int) -> list[Message]:
        models: dict[int, ModelSent] = {}  # strategies use one record in all messages
        sent: list[Message] = []
        for message in messages:
            if not message.content.array_records and step < 0:
                sent.append(message)
                continue
            key = id(next(iter(message.content.array_records.values()), None))
            model = models.setdefault(key, models.get(key) or ModelSent.of(message))
            sent.append(self._addressed(message, model, model.record is arrays, step))
        return sent

    def _addressed(self, message: Message, model: ModelSent, is_global: bool, step: int) -> Message:
        """The message with its model in the form for this node, and a note."""
        number = message.metadata.dst_node_id
        node = self._node(number)
        invitation = NodeInvitation(
            run=self._run, recipe=self.codec.text, seed=self.codec.seed, step=step, counted=node.counted
        )
        record, given = model.record, model.flat
        if self.pull is not None and is_global:
            invitation, record, given = self._version_for(node, model, invitation, self.pull)
        self.traffic[-1].went_down(number, record_bytes(record), record_bytes(model.record))
        records = dict(message.content.items()) | {model.name: record, RECORD: note_record(encode(invitation))}
        message.content = RecordDict(records)
        if step >= 0:
            self._asked[number] = model, given
        return message

    def _version_for(
        self, node: KnownNode, model: ModelSent, invitation: NodeInvitation, pull: PullCodec
    ) -> tuple[NodeInvitation, ArrayRecord, Tensor]:
        if self._versions is None or self._versions.layout != model.layout:
            self._versions = Versions(pull, model.layout, model.flat)
            for each in self._nodes.values():
                each.held = -1
        self._versions.publish(model.flat)
        sent = self._versions.sent_to(node.held)
        invitation = msgspec.structs.replace(invitation, pull=repr(pull.compressor), version=sent.version)
        if sent.difference is None:
            return invitation, array_record(model.arrays | model.layout.write(sent.whole)), sent.whole
        others = {name: each for name, each in model.arrays.items() if name not in model.layout}
        return invitation, array_record({PAYLOAD: payload_array(pull.stype, sent.difference)} | others), sent.whole

    # From nodes to the server.

    def _taken(self, reply: Message) -> bool:
        """Whether to pass a reply to the wrapped strategy. It then has plain arrays."""
        number = reply.metadata.src_node_id
        try:
            answer = self._noted(reply)
            asked = self._asked.pop(number, None)
            if reply.has_error():
                return True
            if asked is None:
                raise MalformedError(f"node {number} was not asked in this round, or has answered; it was left out")
            if answer is not None and answer.step != self._step:
                raise MalformedError(f"node {number} answers step {answer.step}, but this is step {self._step}")
            self._check_weight(number, reply)
            self._unpack(number, reply, *asked)
        except GossamerError as error:
            self._refuse(number, error)
            return False
        return True

    def _noted(self, reply: Message) -> NodeAnswer | None:
        """Remove the mod's note from the reply; None: the node has no mod. Raises MalformedError."""
        number = reply.metadata.src_node_id
        held, self._node(number).held = self._node(number).held, -1
        if reply.has_error() or RECORD not in reply.content.config_records:
            return None
        text = reply.content[RECORD].get(NOTE)
        del reply.content[RECORD]
        answer = from_text(text, NodeAnswer, f"node {number}")
        if answer.run != self._run:
            raise MalformedError(f"node {number} answers another run; it was left out")
        newest = -1 if self._versions is None else self._versions.version
        if answer.held > newest:
            raise MalformedError(f"node {number} claims version {answer.held}, but {newest} is the newest")
        self._node(number).held = max(answer.held, held)
        return answer

    def _check_weight(self, number: int, reply: Message) -> None:
        key = getattr(self.strategy, "weighted_by_key", "num-examples")
        for record in reply.content.metric_records.values():
            weight = record.get(key)
            if weight is not None and not (isinstance(weight, int | float) and 0 < weight <= MOST_SAMPLES):
                raise MalformedError(f"node {number} claims {key} of {str(weight)[:50]}, not 0 to {MOST_SAMPLES:g}")

    def _unpack(self, number: int, reply: Message, model: ModelSent, given: Tensor) -> None:
        """Put plain arrays into a reply. given: (n,), the values that the node received. Raises a GossamerError for
        arrays that do not fit the model."""
        source = f"node {number}"
        name, record = only_record(reply.content, source)
        self.traffic[-1].went_up(number, record_bytes(record), record_bytes(model.record))
        arrays = numpy_arrays(record, source)
        if has_payload(record):
            difference = self.codec.decode(payload_of(record, source), model.layout, number, self._step)
            arrays |= model.layout.write(model.flat - difference)
        else:
            learned = model.layout.read(arrays, source)
            if not all_finite(learned):
                raise MalformedError(f"{source} sent numbers that are not finite; it was left out")
            if given is not model.flat:
                arrays |= model.layout.write(model.flat - (given - learned))
        for each, due in model.arrays.items():
            found = arrays.get(each)
            if found is None or found.shape != due.shape or found.dtype.kind not in NUMBERS:
                raise MalformedError(f'{source} sent no valid "{each}": the model has {due.shape} of {due.dtype}')
        if len(arrays) != len(model.arrays):
            raise MalformedError(f"{source} sent {len(arrays)} arrays, but the model has {len(model.arrays)}")
        reply.content[name] = array_record({each: arrays[each] for each in model.arrays})

    def _refuse(self, number: int, error: GossamerError) -> None:
        log.warning("A contribution was not used: %s", error)
        self.refused[-1][number] = str(error)
