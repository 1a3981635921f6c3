"""Handwritten digits, on workers with shards of different lengths.

Alone:          python examples/digits.py
Three workers:  gossamer run --workers 3 --recipe "PowerSGD(rank=2)" examples/digits.py --model resnet
"""

import argparse
from itertools import islice

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gossamer


def normed(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """x + f(x): (batch, channels, height, width) -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.f = nn.Sequential(normed(channels, channels), normed(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x.add(self.f(x))


def conv() -> nn.Module:
    return nn.Sequential(normed(1, 16), normed(16, 32, stride=2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def resnet() -> nn.Module:
    wide = normed(1, 16), Residual(16), normed(16, 32, stride=2), Residual(32)
    return nn.Sequential(*wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


MODELS = {"conv": conv, "resnet": resnet}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = model(images).argmax(dim=1) == labels
    model.train()
    return float(right.float().mean())


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    learn, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)

    world = gossamer.init()
    training = TensorDataset(images[learn], labels[learn])
    shard = world.shard(training, stratify=labels[learn], seed=args.seed)
    data = DataLoader(training, args.batch, sampler=shard)
    model = MODELS[args.model]().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with gossamer.attach(model, optimizer, args.recipe) as session:
        for epoch in range(args.epochs):
            with session.epoch():  # workers without data stay in the collectives
                for x, y in islice(data, args.steps):
                    session.set_batch_weight(len(y))  # the last batch is shorter
                    loss = cross_entropy(model(x.to(world.device)), y.to(world.device))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    session.log(loss=loss.item())
            with session.averaged_parameters(model):  # the averaged model
                right = accuracy(model, images[test].to(world.device), labels[test].to(world.device))
            session.log(accuracy=right)
            if world.is_first:
                print(f"epoch {epoch + 1}: {right:.1%} of {len(test)} unseen digits are read correctly")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Handwritten digits.")
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--steps", type=int, help="maximum number per epoch")
    options.add_argument("--model", choices=MODELS, default="conv")
    options.add_argument("--batch", type=int, default=32, help="images per worker and step")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--recipe", default="Dense()", help="communication recipe")
    main(options.parse_args())
