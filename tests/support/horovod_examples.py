"""Runs Horovod's examples unchanged, from a copy that is fetched and never committed.

    python tests/support/horovod_examples.py PATH [--workers 2] [--recipe "TopK(0.01)"] [--only NAME ...]

PATH is a checkout of Horovod. Examples of Keras are written for Keras 2 and run on the package tf_keras. Modules that
this program adds replace MNIST, and torchvision with its models, by random images and a small network, and limit the
epochs and steps of a run. Prints run / of.
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
ONE_EPOCH = ["--no-cuda", "--epochs", "1", "--batch-size", "8"]
SYNTHETIC = ["--no-cuda", "--batch-size", "2", "--num-batches-per-iter", "1", "--num-iters", "2", *WARM]
EXAMPLES = {
    "pytorch/pytorch_mnist.py": ONE_EPOCH,
    "pytorch/pytorch_synthetic_benchmark.py": SYNTHETIC,
    "pytorch/pytorch_imagenet_resnet50.py": ONE_EPOCH,
    "elastic/pytorch/pytorch_mnist_elastic.py": ONE_EPOCH,
    "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py": SYNTHETIC,
    "elastic/pytorch/pytorch_imagenet_resnet50_elastic.py": ONE_EPOCH,
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
    "pytorch/pytorch_lightning_mnist.py": "needs Lightning 1, which has accelerator='horovod'",
    "keras/keras_mnist.py": SESSIONS,
    "keras/keras_mnist_advanced.py": SESSIONS,
    "keras/keras_imagenet_resnet50.py": SESSIONS,
    "elastic/tensorflow/tensorflow_keras_mnist_elastic.py": SESSIONS,
    "tensorflow2/tensorflow2_mnist_data_service.py": SERVICE,
    "tensorflow2/tensorflow2_mnist_data_service_train_fn_compute_side_dispatcher.py": SERVICE,
    "tensorflow2/tensorflow2_mnist_data_service_train_fn_training_side_dispatcher.py": SERVICE,
}
TORCHVISION = """
from types import SimpleNamespace as Module
import torch

class Images(torch.utils.data.TensorDataset):
    def __init__(self, shape, classes):
        random = torch.Generator().manual_seed(0)
        images, labels = torch.randn(64, *shape, generator=random), torch.randint(classes, (64,), generator=random)
        super().__init__(images, labels)

def network(**options):
    layers = torch.nn
    return layers.Sequential(
        layers.Conv2d(3, 4, 7, 8), layers.BatchNorm2d(4), layers.AdaptiveAvgPool2d(1), layers.Flatten(),
        layers.Linear(4, 1000),
    )

def nothing(*args, **options):
    return None

names = ("Compose", "ToTensor", "Normalize", "Resize", "CenterCrop", "RandomResizedCrop", "RandomHorizontalFlip")
transforms = Module(**dict.fromkeys(names, nothing))
models = Module(resnet50=network)
datasets = Module(
    MNIST=lambda *args, **options: Images((1, 28, 28), 10),
    ImageFolder=lambda *args, **options: Images((3, 64, 64), 1000),
)
"""
STUB = """
import os, sys
if not os.environ.get("GOSSAMER_EXAMPLE_OF_TENSORFLOW"):
    import tensorboardX
    sys.modules["torch.utils.tensorboard"] = tensorboardX
elif os.environ.get("HOROVOD_RANK") or os.environ.get("RANK"):  # a worker
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
        if "pytorch" in name:
            Path(folder, "torchvision.py").write_text(TORCHVISION)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
            "GOSSAMER_EXAMPLE_OF_TENSORFLOW": "" if "pytorch" in name else "1",
            "HOME": folder,  # examples of torch lock a file there
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
