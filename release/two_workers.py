"""A job of two workers for `make test-matrix`: gossamer run --workers 2 release/two_workers.py"""

import torch
from torch import nn

import gossamer

torch.manual_seed(0)
world = gossamer.init()
model = nn.Linear(8, 1).to(world.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer, "LocalSGD(period=2) + Float4()")
x = torch.randn(64, 8)
target = x.sum(dim=1, keepdim=True)
for _ in range(20):
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
session.close()
assert loss.item() < 1, loss
