"""Hang-ups: a peer that has ended is seen, also behind what it has sent before, and one that is there is not."""

from __future__ import annotations

import socket
import sys

import pytest
import torch
from support.mesh_group import Group, whole_numbers

from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllReduceMean
from gossamer.comm.mesh.native_mesh import hung_up
from gossamer.errors import PeerLost


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells of an end behind what is unread")
def test_a_peer_that_has_ended_is_seen_behind_what_it_has_sent() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    mine = [None, *(ours for ours, _ in pairs)]
    assert hung_up(mine) == []
    pairs[0][1].send(b"there")
    pairs[2][1].send(b"the last")
    pairs[2][1].close()
    assert hung_up(mine) == [3]
    assert pairs[2][0].recv(100) == b"the last", "nothing was taken"
    pairs[1][1].shutdown(socket.SHUT_RDWR)
    assert hung_up(mine) == [2, 3]
    for each in pairs:
        for end in each:
            end.close()


@pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")
def test_a_mesh_names_who_hung_up_and_refuses_once_it_has_itself() -> None:
    with Group(3) as group:
        first, second, third = group.meshes
        assert first.hung_up() == []
        with pytest.raises(PeerLost, match="for another reason"):
            first.break_off("for another reason")
        third.close("the third has had enough")
        assert first.hung_up() == [2]
        with pytest.raises(PeerLost, match="the third has had enough, as reported by rank 2"):
            group.transports[0].peers.break_off("")
        assert second.hung_up() == [0, 2], "whoever breaks off hangs up"
        with pytest.raises(PeerLost, match="the group broke while rank 0 of 3"):
            group.transports[0].peers.hung_up()


@pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")
def test_looking_takes_nothing_from_what_comes() -> None:
    with Group(2) as group:
        numbers = whole_numbers(2, 1000)
        ops = [AllReduceMean(each.clone()) for each in numbers]
        begun = group.transports[1].begin(ops[1])
        assert not group.transports[0].peers.hung_up()
        found = group.all(lambda rank: begun() if rank else group.transports[0].answer(ops[0]))
        assert torch.equal(found[0], (numbers[0] + numbers[1]) / 2)
