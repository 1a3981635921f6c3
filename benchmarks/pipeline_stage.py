"""Pipeline stage: a language model of bytes in as many stages as there are workers, by torch's own pipelining.

    gossamer run --workers 4 --network 100mbit,20ms benchmarks/pipeline_stage.py --codec "Int8()" --steps 24

Prints one line of JSON on rank 0: seconds and loss of every step, and the bytes of one.
"""

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import gossamer
from gossamer.parallel import Boundary, CompressedStage, boundary
from gossamer.plan.emulation.namespaces import sent_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.bytelm import CONTEXT, windows  # found only after the line above

MICROBATCHES, ROWS, WIDTH, HEADS = 4, 8, 128, 4  # rows of a microbatch
BATCH = MICROBATCHES * ROWS
WARMUP = 3  # steps whose bytes are not counted


class Layers(nn.Module):
    """One stage: a block, after the embedding on the first, before the guess on the last."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH) if first else nn.Identity()
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) if first else torch.zeros(0))
        self.block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0, "gelu", batch_first=True, norm_first=True)
        self.guess = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)) if last else nn.Identity()
        self.register_buffer("past", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        x = self.byte(x)
        x = x + self.place if len(self.place) else x
        guess: Tensor = self.guess(self.block(x, self.past, is_causal=True))
        return guess


def surprise(guess: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(guess.flatten(0, 1), following.flatten())


def edge_of(args: argparse.Namespace) -> Boundary | None:
    if args.codec == "none":
        return None
    samples = args.samples if args.feedback else 0
    return boundary(args.codec, shape=(ROWS, CONTEXT, WIDTH), feedback=args.feedback, samples=samples)


def stage_of(rank: int, count: int, edge: Boundary | None) -> PipelineStage:
    first, last = rank == 0, rank == count - 1
    module = CompressedStage(Layers(first, last), before=None if first else edge, after=None if last else edge)
    dense = torch.empty(ROWS, CONTEXT, WIDTH, device="meta", requires_grad=True)
    crossing = dense if edge is None else edge.carrier()
    return PipelineStage(
        module,
        rank,
        count,
        torch.device("cpu"),
        input_args=torch.empty(ROWS, CONTEXT, dtype=torch.int64, device="meta") if first else crossing,
        output_args=torch.empty(ROWS, CONTEXT, 256, device="meta") if last else crossing,
    )


def main(args: argparse.Namespace) -> None:
    world = gossamer.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + world.rank)
    text = windows(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))[: args.samples].long()
    edge = edge_of(args)
    stage = stage_of(world.rank, world.size, edge)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=surprise)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=args.learning_rate)
    order = torch.Generator().manual_seed(args.seed)
    seconds: list[float] = []
    losses = torch.zeros(args.steps)  # known to the last stage
    queue: list[Tensor] = []
    bytes_before = 0
    for step in range(args.steps):
        if step == WARMUP:
            bytes_before = sent_bytes(0)
        queue = queue or list(torch.randperm(len(text), generator=order).split(BATCH))
        ids = queue.pop()
        parts: list[Tensor] = []
        began = time.perf_counter()
        inputs = [text[ids, :-1]] if world.rank == 0 else []
        samples: dict[str, Any] = {"samples": ids} if args.feedback else {}
        if world.rank == world.size - 1:
            schedule.step(target=text[ids, 1:], losses=parts, return_outputs=False, **samples)
            losses[step] = torch.stack(parts).mean()
        else:
            schedule.step(*inputs, **samples)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    sent = torch.tensor([(sent_bytes(0) - bytes_before) / (args.steps - WARMUP)])
    dist.all_reduce(sent)
    dist.broadcast(losses, world.size - 1)
    if world.is_first:
        memory = 0 if edge is None else edge.memory_bytes
        found = {"seconds": seconds, "losses": losses.tolist(), "step_bytes": sent.item(), "memory_bytes": memory}
        print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A language model of bytes in pipeline stages.")
    options.add_argument("--codec", default="none", help='of what crosses, such as "Int8()"; none: no boundary')
    options.add_argument("--feedback", choices=["difference"])
    options.add_argument("--samples", type=int, default=256, help="windows of text that come again and again")
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--learning-rate", type=float, default=2e-3)
    options.add_argument("--seed", type=int, default=0)
    main(options.parse_args())
