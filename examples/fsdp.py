"""FSDP2 within a site, a recipe between sites: the ranks of a site share one copy of the model.

gossamer run --workers 4 examples/fsdp.py --recipe "DiLoCo(period=10) + Int8()"
torchrun --nproc-per-node 4 examples/fsdp.py
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import gossamer

parser = argparse.ArgumentParser()
parser.add_argument("--sites", type=int, default=2)
parser.add_argument("--recipe", default="DiLoCo(period=10) + Int8()")
parser.add_argument("--steps", type=int, default=40)
arguments = parser.parse_args()

world = gossamer.init()
mesh = init_device_mesh("cpu", (arguments.sites, world.size // arguments.sites), mesh_dim_names=("site", "shard"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

inputs = torch.randn(4096, 64)
data = TensorDataset(inputs, inputs[:, :8].abs().argmax(1))
loader = DataLoader(data, batch_size=32, sampler=world.shard(data), drop_last=True)  # different samples on each rank

with gossamer.attach(model, optimizer, arguments.recipe, clip_norm=1.0, mesh=mesh["site"]) as session:
    for _ in range(1 + arguments.steps // len(loader)):
        for x, label in loader:
            if session.steps == arguments.steps:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), label)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with session.averaged_parameters(model), torch.no_grad():
        accuracy = (model(inputs).argmax(1) == data.tensors[1]).float().mean()
    if world.is_first:
        print(f"after {session.steps} steps {accuracy:.0%} are right, where {1 / 8:.0%} is chance")
