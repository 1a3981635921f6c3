from __future__ import annotations

import pytest
from support.processes import free_port

from gossamer.comm.environment.store import RendezvousStore
from gossamer.errors import ConnectError


def test_what_one_pins_all_read() -> None:
    port = free_port()
    first = RendezvousStore("doctor", "127.0.0.1", port, serves=True, seconds=5)
    second = RendezvousStore("doctor", "127.0.0.1", port, serves=False, seconds=5)
    other = RendezvousStore("another", "127.0.0.1", port, serves=False, seconds=5)
    second.pin("topic", "text with ö")
    assert first.read("topic", 5) == "text with ö"
    with pytest.raises(TimeoutError, match="topic"):
        other.read("topic", 0.05)
    second.pin("here/1", "one")
    assert first.everyone("here", 0, 2, "zero", 5) == ["zero", "one"]
    with pytest.raises(ConnectError, match=r"2 of 3 workers .* ranks \[0, 2\]"):
        first.everyone("there", 1, 3, "one", 0.05)
