"""A worker of three, of which the last ends without a word: the others go on in a group that they make beside."""

from __future__ import annotations

import os

import torch
from support.real_worker import world

from gossamer.core.ops import AllReduceMean
from gossamer.errors import PeerLost
from gossamer.transports.process_group import ProcessGroupTransport

transport = ProcessGroupTransport()
whole = transport.answer(AllReduceMean(torch.full((4,), float(world.rank))))
assert whole.tolist() == [1.0] * 4
if world.rank == 2:
    os._exit(0)
try:
    transport.answer(AllReduceMean(torch.zeros(4)))
except PeerLost:
    again = transport.rebuilt([0, 1])
    assert (again.rank, again.world, again.groups) == (world.rank, 2, [(0, 1)])
    mean = again.answer(AllReduceMean(torch.full((4,), float(world.rank))))
    assert mean.tolist() == [0.5] * 4
    assert again.all_gather_text(str(world.rank)) == ["0", "1"]
    print("went on", flush=True)
    os._exit(0)  # torch would wait for the lost one when it takes the default group down
raise AssertionError("nobody was missed")
