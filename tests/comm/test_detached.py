from __future__ import annotations

import pytest
import torch

from gossamer.base.ops import AllReduceMean
from gossamer.base.transport import Transport
from gossamer.comm.detached import DetachedTransport
from gossamer.errors import PeerLost


def test_a_peer_that_came_back_is_alike_with_everyone_and_keeps_its_tensors() -> None:
    transport: Transport = DetachedTransport(1, 3)
    assert (transport.rank, transport.world) == (1, 3)
    assert transport.all_gather_text("mine") == ["mine"] * 3
    tensor = torch.ones(2)
    transport.broadcast_([tensor])
    assert tensor.tolist() == [1, 1]
    transport.close()


def test_what_needs_the_others_is_refused() -> None:
    transport = DetachedTransport(1, 3)
    for ask in (lambda: transport.answer(AllReduceMean(torch.ones(1))), lambda: transport.part(1)):
        with pytest.raises(PeerLost, match=r"rank 1 of 3 was lost and restarted.*ParameterServer"):
            ask()
