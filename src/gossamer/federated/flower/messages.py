"""Messages: create, copy, measure, answer and serialize Flower's messages outside of Flower's runtime."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid

from gossamer.errors import MalformedError

log = logging.getLogger(__name__)

RUN, SERVER_NODE, FIRST_NODE = 1, 1, 1000


class GossamerGrid(Grid):  # type: ignore[misc]  # Flower is not installed for type checks
    """The common part of the virtual and the TCP grid."""

    run: Any = None

    def set_run(self, run: Any) -> None:
        self.run = run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_nodes(self) -> list[Any]:
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]


class MessageHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a message for a node."""

    type: str
    group: str = ""
    identity: str = ""


def called(app: ClientApp, message: Message, context: Context) -> Message:
    """The app's reply; an error reply if the app raises, as in Flower."""
    try:
        return app(message, context)
    except Exception as error:
        log.exception("The ClientApp of node %d raised", context.node_id)
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def unavailable(message: Message, why: str) -> Message:
    """The error reply for an unavailable node."""
    return Message(Error(ErrorCode.NODE_UNAVAILABLE, why), reply_to=message)


def content_bytes(content: RecordDict) -> int:
    """Bytes of a message's records by Flower's count: serialized arrays, metrics and config."""
    return sum(int(record.count_bytes()) for record in content.values())


def copied(record: Any) -> Any:
    """A copy of a record for the receiver, so that neither side sees changes of the other. Arrays are read-only."""
    if isinstance(record, ConfigRecord):
        return ConfigRecord({key: list(each) if isinstance(each, list) else each for key, each in record.items()})
    return record.copy()


def identify_this_process() -> None:
    """Set the task identity of this process, which newer versions of Flower need to sign messages."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    for name, value in (("_run_id", RUN), ("_node_id", SERVER_NODE), ("_task_id", RUN)):
        if getattr(TaskIdentity, name, None) is None:
            setattr(TaskIdentity, name, value)


def head_of(message: Message) -> str:
    """Metadata of a message for a node, as JSON."""
    about = message.metadata
    head = MessageHead(type=about.message_type, group=about.group_id, identity=about.message_id)
    return msgspec.json.encode(head).decode()


def content_to_bytes(content: RecordDict) -> bytes:
    return bytes(recorddict_to_proto(content).SerializeToString())


def content_from_bytes(data: bytes) -> RecordDict:
    """Parse the result of `content_to_bytes`. Raises MalformedError."""
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(data))
    except Exception as error:  # of protobuf or of Flower's records
        raise MalformedError(f"{len(data)} bytes are no content of a Flower message ({error})") from error


def answer_to_bytes(reply: Message) -> bytes:
    """A reply's content ("c") or error ("e"), by the first byte."""
    if reply.has_error():
        return b"e" + msgspec.json.encode([reply.error.code, reply.error.reason or ""])
    return b"c" + content_to_bytes(reply.content)


def answer_from_bytes(data: bytes, asked: Message) -> Message:
    """Parse the reply to a message. Its sender is the message's destination. Raises MalformedError."""
    if data[:1] == b"c":
        return Message(content_from_bytes(data[1:]), reply_to=asked)
    try:
        code, reason = msgspec.json.decode(data[1:], type=tuple[int, str])
    except msgspec.DecodeError as error:
        raise MalformedError(f"a node's answer of {len(data)} bytes cannot be read ({error})") from error
    return Message(Error(code, reason[:2000]), reply_to=asked)
