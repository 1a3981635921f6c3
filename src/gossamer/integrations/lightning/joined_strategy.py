"""Joined strategy: gives Lightning this worker's rank and device, joins the job, and holds the options of attach."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gossamer import attach
from gossamer.comm.environment import JobEnvironment, device_for, here
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import AttachError
from gossamer.events import RecordOption
from gossamer.integrations.lightning import collectives
from gossamer.train.engine.parameter_check import Verify
from gossamer.train.session.recipe_choice import Written
from gossamer.world import init


class LaunchedEnvironment(ClusterEnvironment):  # type: ignore[misc]  # Lightning has no types where it is not installed
    """Ranks of a job that a launcher has started completely."""

    creates_processes_externally = True

    def __init__(self, job: JobEnvironment) -> None:
        super().__init__()
        self._job = job

    @property
    def main_address(self) -> str:
        return self._job.master_address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._job.master_port or 0

    @staticmethod
    def detect() -> bool:
        return launched_job() is not None

    def world_size(self) -> int:
        return self._job.world

    def global_rank(self) -> int:
        return self._job.rank

    def local_rank(self) -> int:
        return self._job.local_rank

    def node_rank(self) -> int:
        """The machine's number, from 0. Exact only if all machines have the same number of workers."""
        return (self._job.rank - self._job.local_rank) // self._job.local_world

    def set_world_size(self, size: int) -> None:
        """The launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """The launcher has decided."""


def launched_job() -> JobEnvironment | None:
    """The job of this process's environment; None if Lightning starts the workers, or has started this one.

    Raises:
        AttachError: in an elastic run.
    """
    if is_elastic():
        raise AttachError(
            "this is an elastic run, but Lightning's samplers and loops need a constant number of workers: a rank that "
            "changes would train on the data of another rank. Start a fixed number of workers, "
            "gossamer run --workers 4 SCRIPT, or write the loop with gossamer.attach."
        )
    if "RANK" not in os.environ and {"NODE_RANK", "LOCAL_RANK"} <= os.environ.keys():
        return None  # Lightning's own launcher sets these variables
    job = here()
    return None if job.launcher == "python" and job.world == 1 else job


def _is_default(name: str, value: Any) -> bool:
    """Whether this is the default of DistributedDataParallel's argument. LightningCLI passes all of them."""
    argument = inspect.signature(DistributedDataParallel.__init__).parameters.get(name)
    return argument is not None and argument.default is value


class JoinedStrategy:
    """Common base of the strategies for the Trainer and for Fabric. It precedes Lightning's DDPStrategy."""

    def __init__(
        self,
        recipe: Written = None,
        *,
        clip_norm: float | None = None,
        verify: Verify = "warn",
        verify_every: int | None = None,
        record: RecordOption = None,
        log_to: Iterable[str] = (),
        **options: Any,
    ) -> None:
        """Store the options of gossamer.attach.

        Args:
            recipe, clip_norm, verify, verify_every, record, log_to: As for gossamer.attach.
            options: Those of every Lightning strategy, such as accelerator or checkpoint_io.

        Raises:
            AttachError: in an elastic run.
        """
        job = launched_job()
        if job is not None:
            options["cluster_environment"] = options.get("cluster_environment") or LaunchedEnvironment(job)
        super().__init__(**options)
        given: dict[str, Any] = self._ddp_kwargs  # type: ignore[attr-defined]
        if strange := ", ".join(name for name, value in given.items() if not _is_default(name, value)):
            raise TypeError(
                f"{type(self).__name__} was given {strange}, which it does not know: the model is not wrapped in "
                "DistributedDataParallel. Leave it out."
            )
        self._attach = partial(
            attach,
            recipe=recipe,
            clip_norm=clip_norm,
            verify=verify,
            verify_every=verify_every,
            record=record,
            log_to=log_to,
        )

    # -- ranks and devices --------------------------------------------------------------------------------------------

    cluster_environment: Any
    parallel_devices: list[torch.device]
    world_size: int
    global_rank: int
    local_rank: int
    num_processes: int

    @property
    def root_device(self) -> torch.device:
        """Device of this worker: devices[local_rank], or the local default if `devices` is shorter."""
        devices = self.parallel_devices
        if devices[0].type == "cpu":
            return devices[0]
        return devices[self.local_rank] if self.local_rank < len(devices) else device_for(here())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        """Let Lightning start the workers if there are several and no launcher has."""
        if not isinstance(self.cluster_environment, LaunchedEnvironment) and self.world_size > 1:
            super()._configure_launcher()  # type: ignore[misc]

    def _join(self) -> None:
        """Join the job by gossamer.init. If Lightning has started the workers, first export their ranks."""
        if self.world_size > 1 and not isinstance(self.cluster_environment, LaunchedEnvironment):
            os.environ.update(
                RANK=str(self.global_rank),
                WORLD_SIZE=str(self.world_size),
                LOCAL_RANK=str(self.local_rank),
                LOCAL_WORLD_SIZE=str(self.num_processes),
                MASTER_ADDR=self.cluster_environment.main_address,
                MASTER_PORT=str(self.cluster_environment.main_port),
            )
            self.cluster_environment = LaunchedEnvironment(here())
        init()

    # -- collective calls ---------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        collectives.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return collectives.broadcast(obj, src, rank=self.global_rank)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks: (world, *shape). sync_grads: use torch's differentiable all-gather."""
        if sync_grads and self.world_size > 1:
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
            return gathered
        return collectives.all_gather(tensor)
