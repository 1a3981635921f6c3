"""Frameworks: bytes per step of one model in each framework, and the seconds that Gossamer adds to its own step.

    python benchmarks/frameworks.py                 # writes docs/benchmarks/frameworks.md
    python benchmarks/frameworks.py --bytes         # the bytes alone, which do not depend on the load of the machine

The same network learns the same data in torch, a Horovod script, JAX, Keras on its three backends and TensorFlow. Two
workers of this machine train it, by `gossamer run`. Each process has one Keras backend, and the frameworks that go with
it. Own steps and steps with a recipe take turns, in blocks of ten steps, so that each block has one round of DiLoCo.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.page import put_between  # found only after the line above
from benchmarks.provenance import ROOT, provenance, scratch

PAGE = ROOT / "docs" / "benchmarks" / "frameworks.md"
RECIPES = ("Dense()", "TopK(0.01)", "DiLoCo(period=10) + Float4()")
SIZES = (64, 256, 16)
BATCH, RATE, WORKERS = 32, 0.01, 2
BLOCK, BLOCKS, WARM_UP = 10, 15, 2  # steps; blocks of each way; blocks that are not counted
COUNTED = 20  # steps whose bytes are counted
Step = Callable[[Any, Any], Any]
Close = Callable[[], None]


def weights() -> list[Any]:
    """Kernels of shape (in, out) and biases, the same on all ranks."""
    import numpy as np

    draw = np.random.default_rng(0)
    return [w.astype("float32") for i, o in pairwise(SIZES) for w in (draw.normal(size=(i, o)) / i**0.5, np.zeros(o))]


def batches(rank: int, count: int) -> list[tuple[Any, Any]]:
    import numpy as np

    draw = np.random.default_rng(1 + rank)
    inputs = [draw.normal(size=(BATCH, SIZES[0])).astype("float32") for _ in range(count)]
    return [(each, each[:, : SIZES[-1]] ** 2) for each in inputs]


# -- one training in each framework: (step, close); recipe None is the framework's own step ----------------------------


def torch_model() -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(*SIZES[:2]), nn.Tanh(), nn.Linear(*SIZES[1:]))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights(), strict=True):
            parameter.copy_(torch.tensor(value.T))
    return model


def torch_step(model: Any, optimizer: Any) -> Step:
    import torch

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.tensor(inputs)), torch.tensor(targets)).backward()
        optimizer.step()

    return step


def in_torch(recipe: str | None) -> tuple[Step, Close]:
    import torch

    import gossamer

    model = torch_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    close = gossamer.attach(model, optimizer, recipe).close if recipe else lambda: None
    return torch_step(model, optimizer), close


def in_horovod(recipe: str | None) -> tuple[Step, Close]:
    import torch

    import gossamer.horovod.torch as hvd

    hvd.init()
    model = torch_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    if recipe:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), recipe=recipe)
    return torch_step(model, optimizer), lambda: None


def in_jax(recipe: str | None) -> tuple[Step, Close]:
    import jax
    import jax.numpy as jnp

    import gossamer.jax

    def loss(parameters: Any, inputs: Any, targets: Any) -> Any:
        first, second = parameters
        hidden = jnp.tanh(inputs @ first["kernel"] + first["bias"])
        return jnp.mean((hidden @ second["kernel"] + second["bias"] - targets) ** 2)

    gradient = jax.jit(jax.grad(loss))
    update = jax.jit(lambda now, mean: jax.tree.map(lambda w, g: w - RATE * g, now, mean))
    given = [jnp.asarray(each) for each in weights()]
    now = [[{"kernel": given[0], "bias": given[1]}, {"kernel": given[2], "bias": given[3]}]]
    session = gossamer.jax.Session(now[0], recipe) if recipe else None

    def own(inputs: Any, targets: Any) -> None:
        now[0] = jax.block_until_ready(update(now[0], gradient(now[0], inputs, targets)))

    def step(inputs: Any, targets: Any) -> None:
        assert session is not None
        mean = session.give(gradient(now[0], inputs, targets))
        after = now[0] if mean is None else update(now[0], mean)
        now[0] = jax.block_until_ready(session.took_step(after))

    return (step, session.close) if session else (own, lambda: None)


def keras_model() -> Any:
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((SIZES[0],)), layers.Dense(SIZES[1], activation="tanh"), layers.Dense(SIZES[2])]
    )
    model.set_weights(weights())
    return model


def in_keras(recipe: str | None) -> tuple[Step, Close]:
    import keras

    from gossamer.keras import GossamerOptimizer

    model, optimizer = keras_model(), keras.optimizers.SGD(RATE)
    if recipe:
        optimizer = GossamerOptimizer(optimizer, recipe)
    model.compile(optimizer, loss="mse", jit_compile=False if keras.backend.backend() == "tensorflow" else "auto")
    return model.train_on_batch, (lambda: optimizer.session.close()) if recipe else lambda: None


def in_tensorflow(recipe: str | None) -> tuple[Step, Close]:
    """A loop with a tape; local training, which a tape does not serve, by the optimizer."""
    import tensorflow as tf

    from gossamer.tensorflow import ATTRIBUTE, DistributedGradientTape, DistributedOptimizer

    model, optimizer = keras_model(), tf.keras.optimizers.SGD(RATE)
    local = recipe is not None and recipe.startswith("DiLoCo")
    if local:
        optimizer = DistributedOptimizer(optimizer, recipe)

    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        if recipe and not local:
            tape = DistributedGradientTape(tape, recipe)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def close() -> None:
        if recipe:
            exchange = optimizer if local else getattr(model.trainable_variables[0], ATTRIBUTE)
            exchange.session.close()

    return tf.function(step), close


Make = Callable[[str | None], tuple[Step, Close]]
FRAMEWORKS: dict[str, dict[str, Make]] = {  # by the Keras backend of their process
    "torch": {"torch": in_torch, "Horovod script, torch": in_horovod, "Keras, torch": in_keras},
    "jax": {"JAX": in_jax, "Keras, JAX": in_keras},
    "tensorflow": {"TensorFlow": in_tensorflow, "Keras, TensorFlow": in_keras},
}
PACKAGES = {"torch": ("torch", "keras"), "jax": ("jax",), "tensorflow": ("tensorflow-cpu",)}


# -- what a worker measures --------------------------------------------------------------------------------------------


def bytes_per_step(make: Make, recipe: str, rank: int) -> float:
    from gossamer import events

    sent = 0.0

    def listen(event: Any) -> None:
        nonlocal sent
        if isinstance(event, events.StepEnded):
            sent += event.bytes_sent

    step, close = make(recipe)
    unsubscribe = events.subscribe(listen)
    for inputs, targets in batches(rank, COUNTED):
        step(inputs, targets)
    unsubscribe()
    close()
    return sent / COUNTED


def overheads(make: Make, recipe: str, rank: int) -> list[float]:
    """Seconds of a block with the recipe over those of a block of own steps right before it."""
    ways = [make(None), make(recipe)]
    found = []
    for number in range(WARM_UP + BLOCKS):
        seconds = []
        for step, _ in ways:
            block = batches(rank, BLOCK)
            began = time.perf_counter()
            for inputs, targets in block:
                step(inputs, targets)
            seconds.append(time.perf_counter() - began)
        if number >= WARM_UP:
            found.append(seconds[1] / seconds[0])
    ways[1][1]()
    return found


def work(backend: str, out: Path, timed: bool) -> None:
    """In one worker: measure the frameworks of a backend, with overheads where `timed`; rank 0 writes to `out`."""
    os.environ |= {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend != "tensorflow":
        sys.modules["tensorflow"] = None  # type: ignore[assignment] # Keras would import it for every backend
    import gossamer

    world = gossamer.init()
    measured = {
        name: {
            recipe: {
                "bytes": bytes_per_step(make, recipe, world.rank),
                "overheads": overheads(make, recipe, world.rank) if timed else [],
            }
            for recipe in RECIPES
        }
        for name, make in FRAMEWORKS[backend].items()
    }
    if world.is_first:
        versions = {package: version(package) for package in PACKAGES[backend]}
        out.write_text(json.dumps({"measured": measured, "versions": versions}), encoding="utf-8")


# -- the page ----------------------------------------------------------------------------------------------------------

Measured = dict[str, dict[str, dict[str, Any]]]  # by framework and recipe


def measure(timed: bool, backends: Sequence[str] = tuple(FRAMEWORKS)) -> tuple[Measured, dict[str, str]]:
    """What two workers of each backend measured, and the versions of the packages."""
    measured: Measured = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in backends:
            out = Path(folder) / f"{backend}.json"
            script = [__file__, "--worker", backend, "--out", str(out), *([] if timed else ["--bytes"])]
            run = [sys.executable, "-m", "gossamer", "run", "--workers", str(WORKERS), *script]
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(run)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            found = json.loads(out.read_text(encoding="utf-8"))
            measured |= found["measured"]
            versions |= found["versions"]
    return measured, versions


def table(measured: Measured, cell: Callable[[str, str], str]) -> str:
    head = ["| framework |" + "".join(f" `{recipe}` |" for recipe in RECIPES), "|---|" + "---:|" * len(RECIPES)]
    return "\n".join(
        [*head, *(f"| {name} |" + "".join(f" {cell(name, recipe)} |" for recipe in RECIPES) for name in measured)]
    )


def bytes_table(measured: Measured) -> str:
    """Bytes per step and worker; those that differ from torch's are marked."""

    def cell(name: str, recipe: str) -> str:
        own, expected = (measured[each][recipe]["bytes"] for each in (name, next(iter(measured))))
        return f"{own:,.1f}" if own == expected else f"**{own:,.1f}** (differs)"

    return table(measured, cell)


def overhead_table(measured: Measured) -> str:
    """Medians over the pairs of blocks, with the quartiles."""

    def cell(name: str, recipe: str) -> str:
        low, middle, high = statistics.quantiles(measured[name][recipe]["overheads"], n=4)
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    return table(measured, cell)


def main(args: argparse.Namespace) -> None:
    measured, versions = measure(not args.bytes)
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    page = scratch(PAGE) if args.quick else PAGE
    texts = {"bytes": bytes_table(measured)} | ({} if args.bytes else {"overhead": overhead_table(measured)})
    for what, text in texts.items():
        print(text, flush=True)
        put_between(page, what, f"{provenance()}\n{told}.\n\n{text}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--bytes", action="store_true", help="measure no seconds")
    options.add_argument("--quick", action="store_true", help="write a copy of the page in runs/quick")
    options.add_argument("--worker", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    options.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work(given.worker, given.out, not given.bytes)
    else:
        main(given)
