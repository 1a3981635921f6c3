"""Notes: what is written is read, and what a stranger writes is refused."""

from __future__ import annotations

import pytest

from gossamer.errors import MalformedError
from gossamer.federated.flower.records import MOST_LETTERS, NodeAnswer, NodeInvitation, from_text, to_text


def test_what_is_written_is_read() -> None:
    told = NodeInvitation(run="r", recipe="TopK(density=0.1)", pull="Int8()", seed=2**53, step=3, counted=1, version=2)
    assert from_text(to_text(told), NodeInvitation, "it") == told
    answer = NodeAnswer(run="r", step=3, held=-1)
    assert from_text(to_text(answer), NodeAnswer, "it") == answer


@pytest.mark.parametrize(
    "text",
    [
        None, 7, b"{}", "", "{", "[]", '{"run": 1}', '{"step": 1}', '{"run": "r", "step": -2}',
        '{"run": "r", "step": 1e400}', '{"run": "r", "more": 1}', '{"run": "r", "held": true}', "[" * 5000,
        '{"run": "' + "r" * MOST_LETTERS + '"}', '{"run": "' + "r" * 9000 + '"}',
    ],
)  # fmt: skip
def test_what_a_stranger_writes_is_refused(text: object) -> None:
    with pytest.raises(MalformedError, match="it sent"):
        from_text(text, NodeAnswer, "it")
