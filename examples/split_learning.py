"""Split learning: images stay on rank 0 and labels on rank 2; the network between them is on rank 1.

gossamer run --workers 3 examples/split_learning.py
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import gossamer
from gossamer.parallel import remote


class Labels(nn.Module):
    """The last layer and the loss: predictions leave this rank, labels never do."""

    def __init__(self, labels: torch.Tensor) -> None:
        super().__init__()
        self.labels, self.head = labels, nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, labels = self.head(x), self.labels[rows]
        return cross_entropy(y, labels), (y.argmax(dim=1) == labels).float().mean()


world = gossamer.init()
torch.manual_seed(world.rank)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
make = partial(torch.optim.AdamW, lr=3e-3)
middle = remote(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), rank=1, optimizer=make, codec="Int8()", clients=[0])
labeled = remote(Labels(labels), rank=2, optimizer=make, codec="Int8()", clients=[0])

if world.rank == 0:
    first = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    optimizer = make(first.parameters())
    for _ in range(200):
        rows = torch.randint(1400, (64,))
        labeled(middle(first(images[rows])), rows)[0].backward()
        for each in (optimizer, middle.optimizer, labeled.optimizer):
            each.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = labeled(middle(first(images[1400:])), torch.arange(1400, len(labels)))[1]
    print(f"{right:.1%} of {len(labels) - 1400} unseen digits are read correctly")
    print(f"{(middle.bytes_sent + labeled.bytes_sent) / 200 / 1000:.1f} kB were sent per step")
