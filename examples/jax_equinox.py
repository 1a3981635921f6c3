"""Handwritten digits with JAX and Equinox: workers average their parameters every ten local steps.

Alone:         python examples/jax_equinox.py
Two workers:   gossamer run --workers 2 examples/jax_equinox.py
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import gossamer
import gossamer.jax


def loss(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels).mean()


def main(args: argparse.Namespace) -> None:
    world = gossamer.init()
    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16, digits.target
    mine = np.arange(world.rank, 1500, world.size)
    draw = np.random.default_rng(world.rank)

    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
    optimizer = optax.adamw(3e-3)
    gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss))

    def apply(model: Any, moments: Any, mean: Any) -> Any:
        updates, moments = optimizer.update(mean, moments, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), moments

    update = eqx.filter_jit(apply)

    with gossamer.jax.Session(model, args.recipe) as session:
        model = session.parameters  # a model, with rank 0's numbers; its functions are carried
        moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        for step in range(args.steps):
            batch = draw.choice(mine, args.batch)
            error, gradients = gradient(model, images[batch], labels[batch])
            mean = session.give(gradients)
            if mean is not None:
                model, moments = update(model, moments, mean)
            model = session.took_step(model)
            if step % 50 == 49:
                session.log(loss=float(error))
        model = session.averaged_parameters()
        right = jnp.mean(jax.vmap(model)(images[1500:]).argmax(axis=1) == labels[1500:])
        session.log(accuracy=float(right))
        if world.is_first:
            print(f"{float(right):.1%} of 297 unseen digits are read correctly")
            print(session.stats)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Handwritten digits with Equinox.")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--batch", type=int, default=32, help="images per worker and step")
    options.add_argument("--recipe", default="DiLoCo(period=10) + Float4()")
    main(options.parse_args())
