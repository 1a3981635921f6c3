"""JAX in tests: eight virtual CPU devices in this process, and a small model whose gradients numpy and torch have too.

Import it before jax; tests are skipped where jax is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")
jax: Any = pytest.importorskip("jax")
optax: Any = pytest.importorskip("optax")
jnp = jax.numpy

from support.virtual_workers import Worker  # noqa: E402 - without jax nothing of this is needed

from gossamer.jax import Session  # noqa: E402

STEPS, LR = 6, 0.125


def parameters(seed: int = 0) -> dict[str, Any]:
    """Of integers, so that sums of them are exact."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "first": {"bias": jnp.zeros(16), "weight": jax.random.randint(keys[0], (16, 6), -2, 3).astype("float32")},
        "last": jax.random.randint(keys[1], (3, 16), -2, 3).astype("float32"),
    }


def batch(step: int, rank: int, size: int = 4) -> tuple[Any, Any]:
    key = jax.random.key(1000 * step + rank)
    return jax.random.normal(key, (size, 6)), jax.random.normal(jax.random.fold_in(key, 1), (size, 3))


def loss(tree: Any, inputs: Any, targets: Any) -> Any:
    hidden = jnp.tanh(inputs @ tree["first"]["weight"].T + tree["first"]["bias"])
    return jnp.mean((hidden @ tree["last"].T - targets) ** 2)


gradient = jax.jit(jax.grad(loss))
update = jax.jit(lambda tree, mean: jax.tree.map(lambda array, each: array - LR * each, tree, mean))


def session_of(worker: Worker, tree: Any, recipe: Any, **options: Any) -> Session:
    """A session of a virtual worker, closed once its work is done."""
    session = Session(tree, recipe, worker.transport, **options)
    worker.array_sessions.append(session.arrays)
    return session


def trained(
    worker: Worker, recipe: str, steps: int = STEPS, grads: Callable[[Any, int, int], Any] | None = None
) -> tuple[Session, Any]:
    """Train `steps` steps; return the session and the parameters."""
    session = session_of(worker, parameters(worker.rank), recipe)
    tree = session.parameters
    for step in range(steps):
        tree = one_step(session, tree, step, worker.rank, grads)
    return session, tree


def one_step(
    session: Session, tree: Any, step: int, rank: int, grads: Callable[[Any, int, int], Any] | None = None
) -> Any:
    found = grads(tree, step, rank) if grads else gradient(tree, *batch(step, rank))
    mean = session.give(found)
    if mean is not None:
        tree = update(tree, mean)
    return session.took_step(tree)


def flat(tree: Any) -> bytes:
    """The bits of all leaves."""
    return b"".join(bytes(memoryview(jax.device_get(leaf)).cast("B")) for leaf in jax.tree.leaves(tree))
