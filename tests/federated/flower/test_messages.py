"""Messages: what is written as bytes is read, and bytes that nobody wrote are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from support.flower_apps import first_arrays

from gossamer.errors import MalformedError
from gossamer.federated.flower.messages import (
    answer_from_bytes,
    answer_to_bytes,
    content_bytes,
    content_from_bytes,
    content_to_bytes,
    copied,
    identify_this_process,
)

identify_this_process()
CONTENT = RecordDict(
    {"arrays": first_arrays(), "metrics": MetricRecord({"n": 3, "l": [0.5]}), "config": ConfigRecord({"a": [1, 2]})}
)
ASKED = Message(CONTENT, 1003, "train")


def test_contents_and_errors_come_back() -> None:
    assert content_from_bytes(content_to_bytes(CONTENT)) == CONTENT
    found = answer_from_bytes(answer_to_bytes(Message(CONTENT, reply_to=ASKED)), ASKED)
    assert found.content == CONTENT
    assert found.metadata.src_node_id == 1003
    failed = answer_from_bytes(answer_to_bytes(Message(Error(2, "disk full"), reply_to=ASKED)), ASKED)
    assert (failed.error.code, failed.error.reason) == (2, "disk full")


@pytest.mark.parametrize("data", [b"", b"x", b"c\xff\xff\xff", b"e", b"e{}", b'e["2", "why"]', b"e[2]"])
def test_what_nobody_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        answer_from_bytes(data, ASKED)


def test_copies_are_their_readers_own() -> None:
    for name in CONTENT:
        mine = copied(CONTENT[name])
        assert mine == CONTENT[name]
        assert mine is not CONTENT[name]
    mine = copied(CONTENT["config"])
    mine["a"].append(3)
    assert CONTENT["config"]["a"] == [1, 2]
    assert content_bytes(CONTENT) > content_bytes(RecordDict({"arrays": first_arrays()})) > 0
