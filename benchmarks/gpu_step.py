"""Training step on one GPU: a GPT-2-shaped model of random weights and tokens, attach(Dense()) over DDP, interleaved.

A world of one: what is left of both are their hooks. What talking costs is in the figures with two workers.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from benchmarks.gpu_device import settled, timed
from benchmarks.report import markdown
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.plan.bench.interleave import interleave, spread

Step = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """Of a GPT-2-shaped model, and of its batch."""

    tokens: int = 50257
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    batch: int = 4


SMALL = Shape(tokens=512, context=32, width=64, layers=2, heads=4, batch=2)


class LanguageModel(nn.Module):
    """How surprising is each next token? (batch, context + 1) -> mean cross entropy; GPT-2's shapes make 124M."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(shape.tokens, shape.width), nn.Embedding(shape.context, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, shape.layers, nn.LayerNorm(shape.width), enable_nested_tensor=False)

    def forward(self, text: Tensor) -> Tensor:
        seen, following = text[:, :-1], text[:, 1:]
        past = nn.Transformer.generate_square_subsequent_mask(seen.shape[1], device=text.device)
        x = self.layers(self.token(seen) + self.place.weight[: seen.shape[1]], past, is_causal=True)
        return cross_entropy(linear(x, self.token.weight).flatten(0, 1), following.flatten())


def tokens(shape: Shape, device: torch.device, seed: int = 0) -> Tensor:
    draws = torch.randint(shape.tokens, (shape.batch, shape.context + 1), generator=torch.Generator().manual_seed(seed))
    return draws.to(device)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> Step:
    def step() -> None:
        with torch.autocast(text.device.type, torch.bfloat16):
            loss = model(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(shape: Shape, rounds: int, steps: int, device: torch.device) -> str:
    """The page's part: seconds of a step of plain torch, of DDP and of attach(Dense()), by turns."""
    torch.manual_seed(0)
    text, plain = tokens(shape, device), LanguageModel(shape).to(device)
    models = {"plain torch": plain, "DistributedDataParallel": copy.deepcopy(plain), "`Dense()`": copy.deepcopy(plain)}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    backend = "nccl" if device.type == "cuda" else "gloo"
    with gossamer.attach(models["`Dense()`"], optimizers["`Dense()`"], "Dense()", record=False):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        try:
            wrapped = {**models, "DistributedDataParallel": DistributedDataParallel(models["DistributedDataParallel"])}
            step_of = {name: stepper(wrapped[name], optimizers[name], text) for name in models}
            turns = {name: timed(_several(step, steps), settled(device)) for name, step in step_of.items()}
            found = interleave(turns, rounds)
        finally:
            dist.destroy_process_group()
    seconds = {name: [each[0] / steps for each in by_round] for name, by_round in found.items()}
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    return f"{parameters / 1e6:.1f} million parameters, {text.numel()} tokens a step.\n\n{table(seconds)}"


def _several(step: Step, count: int) -> Step:
    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def table(seconds: dict[str, list[float]]) -> str:
    ddp = statistics.median(seconds["DistributedDataParallel"])
    lines = [
        {
            "": name,
            "step": f"{1000 * statistics.median(taken):.3g} ms",
            "spread": f"{spread(taken):.0%}",
            "over DDP": f"{statistics.median(taken) / ddp:.3f}",
        }
        for name, taken in seconds.items()
    ]
    return markdown(lines)
