"""Handwritten digits on a hundred devices, each with few samples of few of the ten digits.

On one machine:  gossamer federate examples/federated_digits.py --clients 100 --rounds 50 \
                     --recipe "FedAvg(fraction=0.1, local_epochs=5) + TopK(0.01)"
Partition:       python examples/federated_digits.py --picture partition.png
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy

import gossamer.federated
from gossamer.federated import Round, Update

options = argparse.ArgumentParser(description="Handwritten digits, federated.")
options.add_argument("--devices", type=int, default=100, help="number of devices")
options.add_argument("--alpha", type=float, default=0.1, help="small values: few of the ten digits per device")
options.add_argument("--batch", type=int, default=16)
options.add_argument("--rate", type=float, default=0.5, help="learning rate of a device")
options.add_argument("--seed", type=int, default=0, help="seed of the partition and of the initial model")
options.add_argument("--picture", help="draw the partition into this PNG, without training")
args = options.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
learn, test = train_test_split(torch.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
parts = gossamer.federated.partition(labels[learn], args.devices, by="dirichlet", alpha=args.alpha, seed=args.seed)


@gossamer.federated.model
def make_model() -> nn.Module:
    torch.manual_seed(args.seed)  # the same parameters on every device
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


@gossamer.federated.client
def train(model: nn.Module, told: Round) -> Update:
    """Training loop of a device, on its own digits."""
    assert told.client is not None
    own = learn[parts[told.client % args.devices]]
    mixed = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(told.seed))]
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)
    for batch in told.batches(mixed.split(args.batch)):  # as many epochs or steps as the recipe requests
        optimizer.zero_grad()
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    return Update(samples=len(own), metrics={"loss": loss.item()})


@gossamer.federated.evaluate
def evaluate(model: nn.Module, told: Round) -> Update:
    """Evaluation on the server, on unseen digits."""
    model.eval()
    with torch.no_grad():
        scores = model(images[test])
    right = (scores.argmax(dim=1) == labels[test]).float().mean()
    loss = cross_entropy(scores, labels[test])
    return Update(samples=len(test), metrics={"accuracy": right.item(), "loss": loss.item()})


if __name__ == "__main__" and args.picture:
    from gossamer.federated.population import plot_partition

    plot_partition(parts, labels[learn], args.picture, f"digits on {args.devices} devices, Dirichlet {args.alpha:g}")
