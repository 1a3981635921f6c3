"""What a step will send and remember, before any worker starts: the real aggregations on meta tensors."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from gossamer.buckets import arrange, divide
from gossamer.compressors.feedback import RESIDUAL
from gossamer.compressors.sharded import OWED
from gossamer.control import WEIGHT_BYTES, control_bytes
from gossamer.drive import Priced, price
from gossamer.errors import AttachError
from gossamer.events import Attached, Event, subscribe
from gossamer.fuse import fuse
from gossamer.layout import Layout, Packed
from gossamer.recipe import Recipe
from gossamer.transports.simulated import meta_answer
from gossamer.words import At, Gather, Script, State, Word

WIDTH_PER_LAYER = 64
STEADY = 2**40  # a step after any warm-up: what a training pays for most of its time


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one worker of `workers` sends in a step and keeps between steps; bytes are payload.

    buckets: the words of each bucket; control, buffers: what every step ends with; dense: what a ring would
    send of all gradients in float32.
    """

    workers: int
    parameters: int
    tensors: int
    buckets: tuple[tuple[Priced, ...], ...]
    control_bytes_sent: float
    buffer_bytes_sent: float
    dense_bytes_sent: float
    residual_bytes: int
    other_state_bytes: int

    @property
    def bytes_sent(self) -> float:
        words = sum(word.bytes_sent for words in self.buckets for word in words)
        return words + self.control_bytes_sent + self.buffer_bytes_sent

    @property
    def share_of_dense(self) -> float | None:
        """Bytes sent over those of the dense ring; None in a world of one, which sends nothing."""
        return self.bytes_sent / self.dense_bytes_sent if self.dense_bytes_sent else None


def forecast(recipe: Recipe, model: Attached, *, workers: int) -> Forecast:
    """Price one step of a resolved recipe over the buckets of a model that is attached with it."""
    at = At(step=STEADY, world=workers)
    buckets: list[tuple[Priced, ...]] = []
    states: list[State] = []
    for dtype, layout in model.layouts:
        flat = torch.empty(layout.numel, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        packed = Packed(flat, layout)
        states.append(recipe.compressor.init(packed, at))
        buckets.append(tuple(price(recipe.compressor.aggregate(packed, states[-1], at), workers)))
    parameters = sum(layout.numel for _, layout in model.layouts)
    memory = [(key, packed.flat.nbytes) for state in states for key, packed in state.items()]
    residual_bytes = sum(nbytes for key, nbytes in memory if _is_residual(key))
    return Forecast(
        workers=workers,
        parameters=parameters,
        tensors=sum(len(layout) for _, layout in model.layouts),
        buckets=tuple(buckets),
        control_bytes_sent=float((workers - 1) * (model.control_bytes + (WEIGHT_BYTES if memory else 0))),
        buffer_bytes_sent=(workers - 1) * model.buffer_bytes / workers,
        dense_bytes_sent=2 * (workers - 1) * 4 * parameters / workers,
        residual_bytes=residual_bytes,
        other_state_bytes=sum(nbytes for _, nbytes in memory) - residual_bytes,
    )


def _is_residual(key: str) -> bool:
    """Wrappers put prefixes before the keys of what they wrap: "0.residual"."""
    return key.rpartition(".")[2] in (RESIDUAL, OWED)


def conversation(
    recipe: Recipe, layout: Layout, dtype: torch.dtype, workers: int, control_bytes: int = 0
) -> list[Word]:
    """The words, over meta tensors, that one bucket asks for, round by round; control travels in the first."""
    at = At(step=STEADY, world=workers)
    packed = Packed(torch.empty(layout.numel, dtype=dtype, device="meta"), layout)
    aggregation: Script = recipe.compressor.aggregate(packed, recipe.compressor.init(packed, at), at)
    script = fuse([aggregation, _control(control_bytes)]) if control_bytes else aggregation
    said: list[Word] = []
    answer: Any = None
    while True:
        try:
            said.append(script.send(answer))
        except StopIteration:
            return said
        answer = meta_answer(said[-1], workers, 0)


def _control(nbytes: int) -> Script:
    yield Gather((torch.empty(nbytes, dtype=torch.uint8, device="meta"),))


# -- shapes to price: made up, or a script's own


def assumed_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Shapes like a decoder-only transformer's, with exactly this many parameters.

    Layers of width d hold 12 d^2 + 13 d and take at most three quarters; d = 64 layers, as in common models.
    The rest is an embedding of width d and, for what does not fill a row of it, a bias.
    """
    layers = 0
    while _layers_numel(layers + 1, WIDTH_PER_LAYER * (layers + 1)) <= 0.75 * parameters:
        layers += 1
    width = WIDTH_PER_LAYER * max(layers, 1)
    rows, left = divmod(parameters - _layers_numel(layers, width), width)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (rows, width)} if rows else {}
    for layer in range(layers):
        shapes |= {f"layer.{layer}.{name}": shape for name, shape in _layer_shapes(width).items()}
    return shapes | ({"head.bias": (left,)} if left else {})


def _layers_numel(layers: int, width: int) -> int:
    return layers * (12 * width**2 + 13 * width)


def _layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.weight": (3 * width, width),
        "attention.bias": (3 * width,),
        "projection.weight": (width, width),
        "projection.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }


def assumed(parameters: int, recipe: Recipe) -> Attached:
    """What a session would announce of a model with the assumed shapes."""
    model = {
        name: Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        for name, shape in assumed_shapes(parameters).items()
    }
    return Attached(
        recipe=repr(recipe),
        layouts=tuple(("float32", arrange(bucket, recipe.compressor)) for bucket in divide(model)),
        parameters=parameters,
        buffer_bytes=0,
        control_bytes=control_bytes(len(model)),
        rank=0,
        world=1,
    )


class _Seen(BaseException):
    """Ends a script where it attaches. Not an Exception, so that a script's own handlers let it pass."""


def attached_by(script: Path, arguments: Sequence[str], recipe: Recipe) -> Attached:
    """Run a script in this process until it attaches, with `recipe` in place of its own; nothing is sent."""
    seen: list[Attached] = []

    def listen(event: Event) -> None:
        if isinstance(event, Attached):
            seen.append(event)
            raise _Seen

    unsubscribe = subscribe(listen)
    try:
        with as_main(script, arguments, recipe), redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except (_Seen, SystemExit):
        pass
    finally:
        unsubscribe()
    if not seen:
        raise AttachError(
            f"{script} ended before it called gossamer.attach, so there is no model to explain. Pass the "
            "arguments with which it trains after its name, or a size instead of it: --parameters 10000000."
        )
    return seen[0]


@contextmanager
def as_main(script: Path, arguments: Sequence[str], recipe: Recipe) -> Iterator[None]:
    """What a script sees when it is started by name: its arguments, its folder first, and the recipe."""
    argv, path, environment = sys.argv, sys.path, dict(os.environ)
    sys.argv = [str(script), *arguments]
    sys.path = [str(script.resolve().parent), *path]
    os.environ["GOSSAMER_RECIPE"] = repr(recipe)
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        os.environ.clear()
        os.environ.update(environment)
