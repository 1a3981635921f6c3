"""Next-letter prediction of source code on devices with one file of the standard library each.

    gossamer federate examples/federated_authors.py --clients 200 --rounds 100 \
        --recipe "FedAvg(fraction=0.05, local_steps=20) + TopK(0.01)"
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gossamer.federated
from gossamer.federated import Round, Update

options = argparse.ArgumentParser(description="Federated next-letter prediction.")
options.add_argument("--context", type=int, default=16, help="length of the context in letters")
options.add_argument("--batch", type=int, default=64)
options.add_argument("--rate", type=float, default=0.5, help="learning rate of a device")
args = options.parse_args()

FOLDER = Path(sysconfig.get_paths()["stdlib"])
FILES = [path for path in sorted(FOLDER.rglob("*.py")) if not {"site-packages", "test", "tests"} & {*path.parts}]
FILES = [path for path in FILES if path.stat().st_size >= 1000]
UNSEEN, AUTHORS = FILES[::10], [path for place, path in enumerate(FILES) if place % 10]


def letters(path: Path) -> Tensor:
    return torch.tensor([min(letter, 127) for letter in path.read_bytes()])


def windows(text: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Letters (count, context), and the next letter of each row."""
    begin = torch.randint(len(text) - args.context, (count,), generator=torch.Generator().manual_seed(seed))
    taken = text[begin[:, None] + torch.arange(args.context + 1)]
    return taken[:, :-1], taken[:, -1]


@gossamer.federated.model
def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same parameters on every device
    wide = 16 * args.context
    return nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), nn.Linear(wide, 256), nn.ReLU(), nn.Linear(256, 128))


@gossamer.federated.client
def train(model: nn.Module, told: Round) -> Update:
    """Training loop of a device, on windows of its own file."""
    assert told.client is not None
    text = letters(AUTHORS[told.client % len(AUTHORS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)
    whole = max(len(text) // (args.batch * args.context), 1)  # batches of one pass
    drawn = [windows(text, args.batch, told.seed + place) for place in range(min(whole, told.local_steps or whole))]
    for before, after in told.batches(drawn):
        optimizer.zero_grad()
        loss = cross_entropy(model(before), after)
        loss.backward()
        optimizer.step()
    return Update(samples=len(text), metrics={"loss": loss.item()})


@gossamer.federated.evaluate
def evaluate(model: nn.Module, told: Round) -> Update:
    """Evaluation on the server, on unseen files."""
    model.eval()
    drawn = [windows(letters(path), 32, seed=0) for path in UNSEEN]
    before, after = (torch.cat(each) for each in zip(*drawn, strict=True))
    with torch.no_grad():
        loss = cross_entropy(model(before), after)
    return Update(samples=len(after), metrics={"loss": loss.item()})
