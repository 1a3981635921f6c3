"""Native mesh: headers that name the right operation and a message that is none of it, or was there before."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator, Sequence

import pytest
import torch

from gossamer.base.kernels.library import are_built
from gossamer.comm.mesh import last_words
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.program import CODES, FORMATS, Does, Program, Row
from gossamer.comm.mesh.stall_watchdog import StallTimeouts
from gossamer.errors import MismatchError, PeerLost

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

MESSAGE_BYTES = 2**18
FORM, TAG = 7, 5


class Peers:
    """A mesh of rank 0, and the other ends of its connections, which say anything."""

    def __init__(self, world: int) -> None:
        pairs = [socket.socketpair() for _ in range(1, world)]
        self.mesh = Mesh(0, [None, *(mine for mine, _ in pairs)], StallTimeouts(timeout_seconds=5.0))
        self.theirs = [None, *(theirs for _, theirs in pairs)]

    def says(self, rank: int, message: int, numbers: Sequence[float] = ()) -> None:
        sock = self.theirs[rank]
        assert sock is not None
        sock.sendall(struct.pack("<IIII", 0, FORM, TAG, message) + struct.pack(f"<{len(numbers)}f", *numbers))

    def close(self) -> None:
        for each in filter(None, self.theirs):
            each.close()
        self.mesh.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    found = Peers(3)
    yield found
    found.close()


def taking(does: Does, ranks: Sequence[int], nbytes: int) -> Program:
    """One piece of `nbytes`, of which every one of `ranks` sends all."""
    rows: list[Row] = [(CODES[does], rank, 0, 0, TAG) for rank in ranks]
    numbers = [number for row in rows for number in row]
    return Program(
        rows=(ctypes.c_int32 * len(numbers))(*numbers),
        sizes=(ctypes.c_int64 * 1)(nbytes),
        offsets=(0,),
        form=FORM,
        format=FORMATS[torch.float32],
    )


@pytest.mark.parametrize("does", [Does.ADD, Does.KEEP], ids=str)
@pytest.mark.parametrize("messages", [1, 3, 64, 9_000_000])
def test_a_message_beyond_the_last_one_is_refused(peers: Peers, does: Does, messages: int) -> None:
    """Of nine million, counters lie in pages of their own, and what is beyond them reads as zero: due, if asked."""
    x = torch.zeros(MESSAGE_BYTES // 4)  # as nothing is taken, it does not matter that the piece is longer
    op = peers.mesh.begin(taking(does, [1], messages * MESSAGE_BYTES), [x.data_ptr()], x)
    peers.says(1, message=messages)
    with pytest.raises(MismatchError, match="rank 1 issued another collective"):
        peers.mesh.wait(op)
    assert not x.any()


def test_what_a_peer_said_is_no_mismatch_once_the_mesh_was_closed_by_another_thread(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been its last words, and cannot be read any more."""

    def cannot_be_read(*_: object) -> str:
        peers.mesh.close("another view was made")
        return ""

    monkeypatch.setattr(last_words, "waiting", cannot_be_read)
    x = torch.zeros(4)
    op = peers.mesh.begin(taking(Does.ADD, [1], x.nbytes), [x.data_ptr()], x)
    peers.says(1, message=7)
    with pytest.raises(PeerLost, match="another view was made"):
        peers.mesh.wait(op)


def test_a_summand_that_comes_twice_is_refused(peers: Peers) -> None:
    """Of the two that the sum waits for, one has not come."""
    x = torch.ones(4)
    op = peers.mesh.begin(taking(Does.ADD, [1, 2], x.nbytes), [x.data_ptr()], x)
    for _ in range(2):
        peers.says(1, message=0, numbers=[10.0] * 4)
    with pytest.raises(MismatchError, match="rank 1 issued another collective"):
        peers.mesh.wait(op)
    assert x.tolist() == [1.0] * 4


def test_summands_of_both_make_the_sum(peers: Peers) -> None:
    x = torch.ones(4)
    op = peers.mesh.begin(taking(Does.ADD, [1, 2], x.nbytes), [x.data_ptr()], x)
    for rank in (2, 1):
        peers.says(rank, message=0, numbers=[10.0 * rank] * 4)
    peers.mesh.wait(op)
    assert x.tolist() == [31.0] * 4
