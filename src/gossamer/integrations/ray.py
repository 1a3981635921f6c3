"""Ray Train adapter: starts a TorchTrainer's workers as a Gossamer run, and saves and loads Ray checkpoints.

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
    """Starts a TorchTrainer's workers as a Gossamer run: TorchTrainer(train, torch_config=GossamerConfig()).

    Each start of the workers has a new secret for authentication, which Ray distributes.

    Args:
        timeout_s: Seconds that workers wait for each other when they join, at gossamer.attach and in every step.
        tls: A folder with cert.pem, key.pem and ca.pem on every worker's machine, to encrypt connections.
        interface: Name of the network interface. Default: the interface towards rank 0, or loopback if all workers are
            on one machine.

    Raises:
        ValueError: for options of TorchConfig that do not apply.

    Example:
        trainer = TorchTrainer(train, torch_config=GossamerConfig(), scaling_config=ScalingConfig(num_workers=2))
    """

    tls: str | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        require(
            is_v2_enabled(),
            "RAY_TRAIN_V2_ENABLED=0 selects version 1 of Ray Train, where workers have no rank when they start. Leave "
            "the variable unset.",
        )
        require(
            self.backend is None and self.init_method == "env",
            f"backend={self.backend!r} and init_method={self.init_method!r} would have no effect: Gossamer has its own "
            "rendezvous, and uses NCCL if each worker has a GPU, else Gloo. Write GossamerConfig().",
        )
        require(self.timeout_s > 0, f"timeout_s must be positive, got {self.timeout_s}. Example: timeout_s=300")

    @property
    def backend_cls(self) -> type[Backend]:
        return GossamerBackend

    def to_dict(self) -> dict[str, Any]:
        """The settings that Ray exports."""
        return {"timeout_s": self.timeout_s, "tls": self.tls, "interface": self.interface}


class GossamerBackend(Backend):  # type: ignore[misc]
    """Callbacks of Ray's controller before and after each start of a group of workers."""

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
    session: Session, metrics: Mapping[str, float] | None = None, *, checkpoint: bool = True, **parts: Any
) -> None:
    """Report `metrics` to Ray, with averages over rank 0's steps since the last report. All workers call it.

    Args:
        session: The session of this worker.
        metrics: Numbers by name.
        checkpoint: Whether to call session.save for a Ray checkpoint. Each worker writes its part. The checkpoint is
            valid once Ray's controller has registered it, about a second later.
        parts: Numbers, strings, tensors and containers of them, which `restore` returns.

    Raises:
        LoopError: as `session.save`.
        CheckpointError: as `session.save`.

    Example:
        report(session, {"loss": loss.item()}, epoch=epoch + 1)
    """
    reported = {**(metrics or {}), **_numbers.take()}
    if not checkpoint:
        train.report(reported)
        return
    with tempfile.TemporaryDirectory() as folder:
        session.save(folder, keep=1, **parts)
        train.report(reported, checkpoint=train.Checkpoint.from_directory(folder))


def restore(session: Session) -> dict[str, Any]:
    """Resume from the last reported checkpoint, if any.

    All workers call it once, after attach and track. Ray restarts all workers when one is lost or their number changes;
    the checkpoint may come from a different number of workers.

    Args:
        session: the session of this worker.

    Returns:
        `parts` of that report, or {} without a checkpoint.

    Raises:
        LoopError: as `session.load`.
        CheckpointError: as `session.load`.

    Example:
        first_epoch = restore(session).get("epoch", 0)
    """
    if (checkpoint := train.get_checkpoint()) is None:
        return {}
    with checkpoint.as_directory() as folder:
        return session.load(folder)
