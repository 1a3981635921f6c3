"""JAX on several slices: each slice is a separate JAX job that shards the model over its devices, and one worker.

Two slices of two processes with four virtual devices each, on this machine; or an elastic run, in which slices of one
process are replaced when they are lost:

    gossamer run --workers 4 --recipe "DiLoCo(period=5) + Int8()" examples/jax_slices.py
    gossamer run --workers 2:3 --max-restarts 9 examples/jax_slices.py --processes 1 --steps 2000
"""

import argparse
import os
import socket

DEVICES = 4  # of a process; on TPUs the runtime knows them
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")

import jax  # noqa: E402 - it reads XLA_FLAGS
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import gossamer  # noqa: E402
import gossamer.jax  # noqa: E402

Tree = dict[str, jax.Array]


def join_slice(world: gossamer.World, processes: int) -> None:
    """Ranks 0 to processes - 1 are the first slice, and so on. On Cloud TPU initialize() needs no arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        addresses = world.all_gather(f"127.0.0.1:{free.getsockname()[1]}")
    first = world.rank - world.rank % processes
    jax.distributed.initialize(addresses[first], num_processes=processes, process_id=world.rank % processes)


def loss(parameters: Tree, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = jnp.tanh(inputs @ parameters["hidden"] + parameters["bias"])
    return jnp.mean((hidden @ parameters["output"] - targets) ** 2)


def step(parameters: Tree, moments: Tree, mean: Tree) -> tuple[Tree, Tree]:
    moments = jax.tree.map(lambda moment, each: 0.5 * moment + each, moments, mean)
    return jax.tree.map(lambda array, moment: array - 0.05 * moment, parameters, moments), moments


def train(args: argparse.Namespace) -> None:
    world = gossamer.init()
    if args.processes > 1:
        join_slice(world, args.processes)
    mesh = Mesh(np.array(jax.devices()), ("model",))

    def place(array: np.ndarray, *names: str | None) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    draw = np.random.default_rng(0)
    weights = draw.normal(size=(8, 64)) / 3, draw.normal(size=(64, 1)) / 8
    hidden, output = (each.astype("float32") for each in weights)
    parameters = {
        "hidden": place(hidden, None, "model"),
        "bias": place(np.zeros(64, "float32")),  # all processes of a slice hold it
        "output": place(output, "model", None),
    }
    moments = jax.tree.map(jnp.zeros_like, parameters)
    gradient, update = jax.jit(jax.value_and_grad(loss)), jax.jit(step)

    with gossamer.jax.Session(parameters, args.recipe, state=lambda: moments) as session:
        parameters, moments = session.parameters, session.state
        data = np.random.default_rng(1 + world.rank // args.processes)  # the slices have their own
        while session.steps < args.steps:
            inputs = data.normal(size=(32, 8)).astype("float32")
            error, gradients = gradient(parameters, place(inputs), place(np.sin(inputs.sum(axis=1, keepdims=True))))
            mean = session.give(gradients)
            if mean is not None:
                parameters, moments = update(parameters, moments, mean)
            parameters = session.took_step(parameters)
            session.log(loss=float(error))
        parameters = session.averaged_parameters()
        norms = {name: float(jnp.linalg.norm(array)) for name, array in parameters.items()}
        print(f"slice {world.rank // args.processes}, process {jax.process_index()}: {norms}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--processes", type=int, default=2, help="of each slice")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--recipe", default="Dense()")
    train(options.parse_args())
