"""Elastic runs of JAX and Keras by real processes: a worker is killed and replaced, and all end with equal hashes."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.processes import of_this_checkout

pytestmark = [pytest.mark.processes, pytest.mark.new_programs, pytest.mark.timeout(400)]

BEGIN = """
import os, signal, sys, zlib
os.environ["KERAS_BACKEND"] = "torch"
sys.modules["tensorflow"] = None  # Keras would import it for every backend
import gossamer, numpy as np

world, changes = gossamer.init(), []
place, first_life = int(os.environ["GOSSAMER_PLACE"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def die_at_step_5(steps):
    if place == 1 and first_life and steps >= 5:
        os.kill(os.getpid(), signal.SIGKILL)

def ended(session, arrays):
    digest = zlib.crc32(b"".join(np.asarray(each).tobytes() for each in arrays))
    print("ended", place, session.steps, digest, changes, flush=True)
"""

JAX = """
import jax, jax.numpy as jnp, optax
import gossamer.jax

optimizer, settled = optax.adam(0.05), 0
parameters = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
moments = optimizer.init(parameters)
session = gossamer.jax.Session(parameters, "TopK(0.5)", state=lambda: moments)
session.on_change(lambda change: changes.append((len(change.lost), change.joined)))
parameters, moments = session.parameters, session.state

@jax.jit
def update(parameters, moments, mean):
    updates, moments = optimizer.update(mean, moments, parameters)
    return optax.apply_updates(parameters, updates), moments

while settled < 5:
    die_at_step_5(session.steps)
    key = jax.random.key(1000 * session.steps + world.rank)
    mean = session.give(jax.tree.map(lambda each: each - jax.random.normal(key, each.shape), parameters))
    if mean is not None:
        parameters, moments = update(parameters, moments, mean)
    parameters = session.took_step(parameters)
    settled += world.size == 2 and session.steps > 8
ended(session, jax.tree.leaves((parameters, moments)))
session.close()
"""

KERAS = """
import keras
from gossamer.keras import GossamerCallback, GossamerOptimizer

class Watch(keras.callbacks.Callback):
    settled = 0

    def on_train_begin(self, logs=None):
        session = self.model.optimizer.session
        session.on_change(lambda change: changes.append((len(change.lost), change.joined)))

    def on_train_batch_end(self, batch, logs=None):
        session = self.model.optimizer.session
        die_at_step_5(session.steps)
        self.settled += world.size == 2 and session.steps > 8
        if self.settled == 5:
            session.request_stop()

model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile(GossamerOptimizer(keras.optimizers.Adam(0.01), "TopK(0.5)"), loss="mse")
random = np.random.default_rng([place, first_life])
x, y = random.normal(size=(20000, 6)).astype("float32"), random.normal(size=(20000, 1)).astype("float32")
model.fit(x, y, batch_size=4, epochs=20, verbose=0, callbacks=[GossamerCallback(), Watch()])
optimizer = model.optimizer
variables = [*model.trainable_variables, *optimizer.inner.variables]
ended(optimizer.session, [keras.ops.convert_to_numpy(each) for each in variables])
"""


@pytest.mark.parametrize(("library", "source"), [("jax", JAX), ("keras", KERAS)], ids=["jax", "keras"])
def test_a_killed_worker_is_replaced_and_all_end_with_equal_hashes(library: str, source: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = tmp_path / "train.py"
    script.write_text(BEGIN + source)
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "1:2", "--max-restarts", "1", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=of_this_checkout(), capture_output=True, text=True, timeout=380)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    found = re.findall(r"\bended (\d) (\d+ \d+) ", output)
    assert sorted(place for place, _ in found) == ["0", "1"], output
    assert len({rest for _, rest in found}) == 1, output
    assert "[(1, 0), (0, 1)]" in output  # a loss, then a newcomer
