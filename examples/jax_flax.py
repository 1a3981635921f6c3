"""Handwritten digits with JAX, flax and optax: gradients are averaged within a jitted scan over the steps of an epoch.

Alone:         python examples/jax_flax.py
Two workers:   gossamer run --workers 2 --recipe "TopK(0.01)" examples/jax_flax.py
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import gossamer
import gossamer.jax

MODEL = linen.Sequential([linen.Dense(64), linen.relu, linen.Dense(10)])


def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply(parameters, images), labels).mean()


def step(state: TrainState, batch: tuple[jax.Array, jax.Array]) -> tuple[TrainState, jax.Array]:
    error, gradients = jax.value_and_grad(loss)(state.params, *batch)
    return state.apply_gradients(grads=gradients), error


def main(args: argparse.Namespace) -> None:
    world = gossamer.init()
    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16, digits.target
    steps = 1500 // world.size // args.batch
    mine = np.arange(world.rank, 1500, world.size)[: steps * args.batch]  # equally many on each worker

    optimizer = gossamer.jax.optimizer(optax.adamw(3e-3), args.recipe)
    parameters = MODEL.init(jax.random.key(0), images[:1])  # one key: all workers begin alike
    state = TrainState.create(apply_fn=MODEL.apply, params=parameters, tx=optimizer)
    epoch = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))

    for number in range(args.epochs):
        order = np.random.default_rng((number, world.rank)).permutation(mine).reshape(steps, args.batch)
        state, errors = epoch(state, (jnp.asarray(images[order]), jnp.asarray(labels[order])))
        optimizer.log(loss=float(errors[-1]))
        right = jnp.mean(MODEL.apply(state.params, images[1500:]).argmax(axis=1) == labels[1500:])
        if world.is_first:
            print(f"epoch {number + 1}: {float(right):.1%} of 297 unseen digits are read correctly")
    if world.is_first:
        print(optimizer.stats)
    optimizer.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Handwritten digits with flax.")
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--batch", type=int, default=32, help="images per worker and step")
    options.add_argument("--recipe", default="Dense()")
    main(options.parse_args())
