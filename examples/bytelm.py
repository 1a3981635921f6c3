"""A byte-level language model of the source code of Python's standard library.

python examples/bytelm.py, or: gossamer run --workers 4 --recipe "Float4()" examples/bytelm.py --size base
"""

import argparse
import itertools
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gossamer

CONTEXT = 64  # bytes
SIZES = {"tiny": (32, 3, 2), "small": (64, 4, 4), "base": (256, 4, 4), "large": (512, 8, 8)}  # width, blocks, heads


def windows(files: list[Path]) -> Tensor:
    """Row i is the i-th stretch of CONTEXT bytes and the byte after it."""
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)


class ByteLM(nn.Module):
    """Mean cross entropy of the next byte in nats, of a (batch, CONTEXT + 1) tensor."""

    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.guess = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        seen, following = text[:, :-1].long(), text[:, 1:].long()
        past = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        x = self.blocks(self.byte(seen) + self.place.weight, past, is_causal=True)
        return cross_entropy(self.guess(x).flatten(0, 1), following.flatten())


def data_of(world: gossamer.World, batch: int, seed: int) -> tuple[Iterator[Tensor], Tensor]:
    """Endless batches of this worker, and its part of 256 held-out windows."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    training, held_out = windows([file for i, file in enumerate(files) if i % 10]), windows(files[::10])
    data = DataLoader(TensorDataset(training), batch, sampler=world.shard(training, seed=seed), drop_last=True)
    exam = held_out[:: len(held_out) // 256][:256][world.rank :: world.size].to(world.device)
    return (text for epoch in itertools.count() for (text,) in data), exam


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    world = gossamer.init()
    texts, exam = data_of(world, args.batch, args.seed)
    model = ByteLM(*SIZES[args.size]).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    def evaluate() -> float:
        with torch.no_grad(), session.averaged_parameters(model):  # the averaged model
            return gossamer.mean(float(model(exam)))

    with gossamer.attach(model, optimizer, args.recipe) as session:
        deadline = time.monotonic() + args.seconds
        mine = session.load(args.checkpoint) if args.checkpoint else {}
        with session.epoch():
            for step in range(mine.get("step", 0) + 1, args.steps + 1):
                loss = model(next(texts).to(world.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                session.log(loss=loss.item())
                if args.evaluate_every and step % args.evaluate_every == 0:
                    session.log(validation_loss=evaluate())
                if args.checkpoint and step % args.checkpoint_every == 0:
                    session.save(args.checkpoint, step=step)
                if time.monotonic() > deadline:
                    session.request_stop()  # all ranks leave the epoch after the same step
        session.log(validation_loss=evaluate())


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A byte-level language model.")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--size", choices=SIZES, default="small")
    options.add_argument("--batch", type=int, default=8, help="windows per worker and step")
    options.add_argument("--learning-rate", type=float, default=1e-3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--recipe", default="Dense()", help="communication recipe")
    either = options.add_mutually_exclusive_group()  # a checkpoint needs all ranks at the same step
    either.add_argument("--checkpoint", metavar="DIRECTORY", help="save here, and resume from here")
    either.add_argument("--seconds", type=float, default=float("inf"), help="stop after this many seconds")
    options.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    options.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS", help="0: only at the end")
    main(options.parse_args())
