"""Runs Horovod's TensorFlow and Keras examples unchanged, from a copy that is fetched and never committed.

    python tests/support/horovod_examples.py PATH [--workers 2] [--recipe "TopK(0.01)"] [--only NAME ...]

PATH is a checkout of Horovod. The examples are written for Keras 2 and run on the package tf_keras. A module outside of
them replaces MNIST by random images, and limits the epochs and steps of a run. Prints run / of.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SHORT = ["--no-cuda", "--batch-size", "2", "--num-batches-per-iter", "1", "--num-iters", "2", "--model", "MobileNetV2"]
WARM = ["--num-warmup-batches", "1"]
EXAMPLES = {
    "tensorflow2/tensorflow2_mnist.py": [],
    "tensorflow2/tensorflow2_keras_mnist.py": [],
    "tensorflow2/tensorflow2_synthetic_benchmark.py": [*SHORT, *WARM],
    "tensorflow2/tensorflow2_keras_synthetic_benchmark.py": SHORT,
    "elastic/tensorflow2/tensorflow2_mnist_elastic.py": [],
    "elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py": [],
    "elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py": [*SHORT, *WARM],
}
SESSIONS = "needs tf.ConfigProto and tf.Session, which TensorFlow 2 does not have"
SERVICE = "needs Horovod's compute service for tf.data"
CANNOT_RUN = {
    "keras/keras_mnist.py": SESSIONS,
    "keras/keras_mnist_advanced.py": SESSIONS,
    "keras/keras_imagenet_resnet50.py": SESSIONS,
    "elastic/tensorflow/tensorflow_keras_mnist_elastic.py": SESSIONS,
    "tensorflow2/tensorflow2_mnist_data_service.py": SERVICE,
    "tensorflow2/tensorflow2_mnist_data_service_train_fn_compute_side_dispatcher.py": SERVICE,
    "tensorflow2/tensorflow2_mnist_data_service_train_fn_training_side_dispatcher.py": SERVICE,
}
STUB = """
import os
if os.environ.get("HOROVOD_RANK") or os.environ.get("RANK"):  # a worker
    import numpy, tensorflow as tf

    def load_data(path="mnist.npz"):
        random = numpy.random.default_rng(0)
        images, labels = random.integers(0, 256, (512, 28, 28)).astype("uint8"), random.integers(0, 10, 512)
        return (images, labels.astype("uint8")), (images[:64], labels[:64].astype("uint8"))

    tf.keras.datasets.mnist.load_data = load_data
    fit, take = tf.keras.Model.fit, tf.data.Dataset.take
    tf.keras.Model.fit = lambda self, *args, steps_per_epoch=None, epochs=1, **more: fit(
        self, *args, steps_per_epoch=min(steps_per_epoch or 2, 2), epochs=min(epochs, 4), **more
    )
    tf.data.Dataset.take = lambda self, count, *args, **more: take(self, min(count, 4), *args, **more)
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("path", type=Path)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--recipe")
    options.add_argument("--only", nargs="+")
    given = options.parse_args()
    names = [name for name in EXAMPLES if not given.only or Path(name).stem in given.only]
    ran = sum(run(given.path.resolve(), name, given.workers, given.recipe) for name in names)
    for name, reason in CANNOT_RUN.items():
        print(f"{name}: {reason}")
    print(f"examples: {ran} run of {len(names)}; {len(CANNOT_RUN)} cannot run")


def run(path: Path, name: str, workers: int, recipe: str | None) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(STUB)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
            "TF_USE_LEGACY_KERAS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "gossamer", "run", "--as-horovod", "--workers", str(workers)]
        command += ["--recipe", recipe] if recipe else []
        command += ["--logs", f"{folder}/logs", str(path / "examples" / name), *EXAMPLES[name]]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900)
        logs = [file.read_text(errors="replace") for file in sorted(Path(folder, "logs").rglob("*.log"))]
    print(f"{name}: {'run' if done.returncode == 0 else f'exit {done.returncode}'}", flush=True)
    if done.returncode:
        print(*(text[-2500:] for text in [*logs, done.stdout, done.stderr]), sep="\n", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
