"""One of several workers that train for some steps, and say how their mesh travels and what they came to."""

from __future__ import annotations

import json
import sys

import torch
from support.real_worker import world

import gossamer
from gossamer.comm.mesh.encrypted import EncryptedFallback
from gossamer.train.checkpoint import digest
from gossamer.train.session.transport_setup import group_transport

sealed = isinstance(getattr(group_transport(world, "auto"), "_fallback", None), EncryptedFallback)
torch.manual_seed(world.rank)
model = torch.nn.Linear(300, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer, recipe="Dense()")
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
session.save(sys.argv[1])
session.close()
print("said " + json.dumps({"digest": digest(list(model.parameters())), "sealed": sealed}))
