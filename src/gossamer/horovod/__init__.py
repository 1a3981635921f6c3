"""Horovod's API on Gossamer: scripts that import Horovod run unchanged, under any recipe. See
docs/how-to/integrations/horovod.md.

    import gossamer.horovod.torch as hvd

torch/       the API for torch
tensorflow/  the API for TensorFlow and tf.keras
keras/       the API for the package keras
compression  Compression.none and Compression.fp16
exchange     the recipe of an optimizer or a tape, for every framework
elastic      State, ObjectState and run_fn, for every framework
basics       init, ranks, process sets, handles
calls        collective calls: their form and how they communicate
negotiation  matches the calls of the ranks by name
objects      Python objects between ranks, without pickles
timeline     the file that shows calls
exceptions   HorovodInternalError, HostsUpdatedInterrupt
command      `python -m gossamer.horovod`, as horovodrun
alias        makes `import horovod` find this package
"""

from typing import Any

__all__ = ["__version__"]
__version__ = "0.28.1"  # the version of Horovod that has this API

UNAVAILABLE = {
    "mxnet": "MXNet is retired. Train with torch: import gossamer.horovod.torch as hvd.",
    "spark": 'start workers by `gossamer run --as-horovod`, or on a cluster: "Clusters" in the documentation.',
    "ray": "use gossamer.integrations.ray: TorchTrainer(train, torch_config=GossamerConfig(), ...).",
    "run": "start the script by `gossamer run --as-horovod --workers 4 train.py`.",
    "runner": "start the script by `gossamer run --as-horovod --workers 4 train.py`.",
    "data": "use torch's DataLoader with num_workers.",
    "tensorflow.data": "use tf.data with Dataset.shard(hvd.size(), hvd.rank()).",
    "tensorflow.gradient_aggregation": "write hvd.DistributedOptimizer(optimizer, backward_passes_per_step=4).",
}


def __getattr__(name: str) -> Any:
    """Raise AttributeError; for names of Horovod that are not available, with the alternative."""
    if name in UNAVAILABLE:
        raise AttributeError(f"horovod.{name} is not available: {UNAVAILABLE[name]}")
    raise AttributeError(f"module 'gossamer.horovod' has no attribute {name!r}")
