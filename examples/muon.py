"""Two optimizers in one, for strategies with local steps: Muon for matrices, AdamW for the other parameters.

Alone:         python examples/muon.py
Four workers:  gossamer run --workers 4 --recipe "DiLoCo(period=20) + OneBit()" examples/muon.py
"""

import argparse
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import gossamer


class Both(Optimizer):
    """Steps several optimizers. They share its groups and its state, so schedulers, checkpoints and gossamer.attach
    see one optimizer."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:  # load_state_dict ends here, with new groups and a new state
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


def muon(parameters: Mapping[str, Parameter], learning_rate: float) -> Optimizer:
    """Muon for matrices between layers; AdamW for biases, and for the first and the last matrix."""
    matrices = [name for name, parameter in parameters.items() if parameter.ndim == 2]
    inner = [parameters[name] for name in matrices[1:-1]]
    others = [parameter for name, parameter in parameters.items() if name not in matrices[1:-1]]
    return Both(
        Muon(inner, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=learning_rate),
    )


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    learn, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)

    world = gossamer.init()
    training = TensorDataset(images[learn], labels[learn])
    data = DataLoader(training, 16, sampler=world.shard(training, seed=args.seed), drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(data))
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(world.device)
    optimizer = muon(dict(model.named_parameters()), learning_rate=0.01)

    with gossamer.attach(model, optimizer, args.recipe) as session:
        for x, y in itertools.islice(batches, args.steps):
            loss = cross_entropy(model(x.to(world.device)), y.to(world.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item())
        with session.averaged_parameters(model), torch.no_grad():
            right = model(images[test].to(world.device)).argmax(dim=1).cpu() == labels[test]
        session.log(accuracy=float(right.float().mean()))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Digits, learned with Muon and AdamW.")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--recipe", default="DiLoCo(period=20) + OneBit()", help="communication recipe")
    main(options.parse_args())
