"""Overhead of gossamer.jax over the plain JAX step, and bytes per step beside the same model in torch.

Steps alternate in one process: one without Gossamer, one with a session between two jitted functions, one with the
transformation within jit. Other load on the machine slows all alike; ratios are of medians, and processor seconds
depend less on it.

    python benchmarks/jax_overhead.py                           # the hand-over alone
    gossamer run --workers 2 benchmarks/jax_overhead.py         # with communication
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import gossamer
import gossamer.jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

TARGET = 1.05
WARM_UP = 5
RECIPES = ("Dense()", "TopK(0.01)", "DiLoCo(period=10) + Float4()")
OPTIMIZER = optax.sgd(0.01)


def layers(width: int, depth: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {f"{number}": draw.normal(size=(width, width)).astype("float32") / width**0.5 for number in range(depth)}


def loss(parameters: Any, inputs: Any) -> Any:
    for name in sorted(parameters):
        inputs = jnp.tanh(inputs @ parameters[name])
    return jnp.mean(inputs**2)


def apply(gradients: Any, state: Any, parameters: Any) -> Any:
    updates, state = OPTIMIZER.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


GRADIENT, UPDATE = jax.jit(jax.grad(loss)), jax.jit(apply)
Step = Callable[[Any], None]


def plain(parameters: Any) -> Step:
    now = [parameters, OPTIMIZER.init(parameters)]

    def step(inputs: Any) -> None:
        now[:] = jax.block_until_ready(UPDATE(GRADIENT(now[0], inputs), now[1], now[0]))

    return step


def between(session: gossamer.jax.Session) -> Step:
    parameters = session.parameters
    now = [parameters, OPTIMIZER.init(parameters)]

    def step(inputs: Any) -> None:
        mean = session.give(GRADIENT(now[0], inputs))
        if mean is not None:
            now[:] = UPDATE(mean, now[1], now[0])
        now[0] = jax.block_until_ready(session.took_step(now[0]))

    return step


def within(parameters: Any, tx: Any) -> Step:
    now = [parameters, tx.init(parameters)]

    def whole(parameters: Any, state: Any, inputs: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(parameters, inputs), state, parameters)
        return optax.apply_updates(parameters, updates), state

    jitted = jax.jit(whole)

    def step(inputs: Any) -> None:
        now[:] = jax.block_until_ready(jitted(*now, inputs))

    return step


def ratios(own: Step, other: Step, inputs: Any, count: int) -> str:
    """Median seconds of both steps, made in turns, and their ratio; and that of processor seconds, of all threads."""
    seconds: tuple[list[float], ...] = ([], [], [], [])
    for _ in range(count + WARM_UP):
        for place, step in enumerate((own, other)):
            began, busy = time.perf_counter(), time.process_time()
            step(inputs)
            seconds[place].append(time.perf_counter() - began)
            seconds[place + 2].append(time.process_time() - busy)
    ours, theirs, busy_ours, busy_theirs = (statistics.median(each[WARM_UP:]) for each in seconds)
    times = f"{ours * 1e3:.2f} ms over {theirs * 1e3:.2f} ms"
    return f"{times}: {ours / theirs:.3f} (processor {busy_ours / busy_theirs:.3f})"


def bytes_in_torch(parameters: dict[str, Any], recipe: str, steps: int) -> float:
    """Per step, of a torch model with the same tensors."""
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.tensor(array)) for name, array in parameters.items()}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gossamer.attach(model, optimizer, recipe) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.stack([each.square().mean() for each in model.values()]).sum().backward()
            optimizer.step()
        sent: float = session.stats.run.bytes_sent / steps
    return sent


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # as `gossamer run` does: on a busy machine threads wait for each other
    world = gossamer.init()
    arrays = layers(args.width, args.depth)
    parameters = jax.tree.map(jnp.asarray, arrays)
    inputs = jax.random.normal(jax.random.key(world.rank), (args.batch, args.width))
    for recipe in RECIPES:
        session = gossamer.jax.Session(parameters, recipe)
        text = f"{recipe}: session {ratios(between(session), plain(parameters), inputs, args.steps)}"
        taken = args.steps + WARM_UP
        sent = session.stats.run.bytes_sent / taken
        session.close()
        theirs = bytes_in_torch(arrays, recipe, taken)
        if "DiLoCo" not in recipe:
            tx = gossamer.jax.optimizer(OPTIMIZER, recipe)
            text += f"; optimizer {ratios(within(parameters, tx), plain(parameters), inputs, args.steps)}"
            tx.close()
        if world.is_first:
            print(f"{text}; bytes a step: JAX {sent:.0f}, torch {theirs:.0f}", flush=True)
    if world.is_first:
        size = sum(each.nbytes for each in arrays.values()) / 1e6
        print(f"target {TARGET}; {world.size} workers, {len(arrays)} leaves, {size:.1f} MB; {provenance()}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--depth", type=int, default=4)
    options.add_argument("--batch", type=int, default=512)
    options.add_argument("--steps", type=int, default=30)
    main(options.parse_args())
