"""Ray Train adapter: starts a TorchTrainer's workers as a run of Gossamer's, and saves and loads by Ray's checkpoints.

    TorchTrainer(train, torch_config=GossamerConfig(), scaling_config=ScalingConfig(num_workers=2))

In `train`, gossamer.init() and gossamer.attach(model, optimizer, recipe) work as in any script.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.errors import require
from gossamer.integrations.library_versions import require_library
from gossamer.integrations.ray_group import SessionNumbers, leave_group, start_group
from gossamer.train.session.session import Session

require_library("ray", "2.60", extra="ray-train")

import ray  # noqa: E402 - not before its version is known
from ray import train  # noqa: E402
from ray.train._internal.utils import get_address_and_port  # noqa: E402
from ray.train.backend import Backend  # noqa: E402
from ray.train.torch import TorchConfig  # noqa: E402
from ray.train.v2._internal.constants import is_v2_enabled  # noqa: E402

__all__ = ["GossamerConfig", "report", "restore"]

LEAVING_SECONDS = 5.0  # Ray ends the processes afterwards
_numbers = SessionNumbers()  # of a worker, from its group's start on


@dataclass
class GossamerConfig(TorchConfig):  # type: ignore[misc] # Ray has no types
    """What makes a TorchTrainer's workers a run of Gossamer's; its argument torch_config.

    timeout_s: how long workers wait for each other, when they join, at gossamer.attach and in every step. tls: a folder
    with cert.pem, key.pem and ca.pem on every worker's machine, by which what they say to each other is encrypted.
    interface: the name of the network interface for it; by default the one towards rank 0, and loopback where all
    workers are on one machine.

    Every start of the workers has a secret of its own, by which they know each other; Ray brings it to them. Raises
    ValueError for options of TorchConfig's that have no meaning here.
    """

    tls: str | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        require(
            is_v2_enabled(),
            "RAY_TRAIN_V2_ENABLED=0 asks for Ray Train's first API, whose workers do not know their ranks when they "
            "are started. Leave the variable unset.",
        )
        require(
            self.backend is None and self.init_method == "env",
            f"backend={self.backend!r} and init_method={self.init_method!r} would have no effect: Gossamer's workers "
            "meet by its own protocol, and use NCCL where each has a GPU, else Gloo. Write GossamerConfig().",
        )
        require(self.timeout_s > 0, f"timeout_s={self.timeout_s} is no time in which a worker could come.")

    @property
    def backend_cls(self) -> type[Backend]:
        return GossamerBackend

    def to_dict(self) -> dict[str, Any]:
        """What Ray exports of it."""
        return {"timeout_s": self.timeout_s, "tls": self.tls, "interface": self.interface}


class GossamerBackend(Backend):  # type: ignore[misc]
    """Ray's controller calls it around each start of a group of workers."""

    share_cuda_visible_devices = True  # a worker's GPU is the one of its local rank

    def on_start(self, worker_group: Any, backend_config: GossamerConfig) -> None:
        start_group(
            worker_group,
            get_address_and_port,
            train.get_context,
            timeout_seconds=backend_config.timeout_s,
            tls=backend_config.tls,
            interface=backend_config.interface,
        )
        worker_group.execute(_watch_steps)

    def on_shutdown(self, worker_group: Any, backend_config: GossamerConfig) -> None:
        leaving = worker_group.execute_async(leave_group)
        ray.wait(leaving, num_returns=len(leaving), timeout=LEAVING_SECONDS)  # raises nothing for those that are lost


def _watch_steps() -> None:
    _numbers.watch()


def report(
    session: Session, metrics: Mapping[str, float] | None = None, *, checkpoint: bool = True, **mine: Any
) -> None:
    """Tell Ray `metrics`, and what rank 0's steps since the last report took; every worker calls it at the same place.

    checkpoint: whether session.save goes with it, where Ray keeps its checkpoints: each worker writes its part, and Ray
    brings them together; it counts once Ray's controller has taken note of it, a second later or so. mine: numbers,
    text, tensors and containers of them, which `restore` returns. Raises what session.save does.
    """
    told = {**(metrics or {}), **_numbers.take()}
    if not checkpoint:
        train.report(told)
        return
    with tempfile.TemporaryDirectory() as folder:
        session.save(folder, keep=1, **mine)
        train.report(told, checkpoint=train.Checkpoint.from_directory(folder))


def restore(session: Session) -> dict[str, Any]:
    """Resume from the checkpoint that was reported last, if any; returns `mine` of that report, or {}.

    Every worker calls it once, after attach and track. Ray starts all workers again when one is lost or their number
    changes; another number of them may have saved it. Raises what session.load does.
    """
    if (checkpoint := train.get_checkpoint()) is None:
        return {}
    with checkpoint.as_directory() as folder:
        return session.load(folder)
