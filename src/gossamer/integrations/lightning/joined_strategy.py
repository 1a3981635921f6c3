"""Joined strategy: gives Lightning this worker's rank and device, joins the job, and holds what attach is given."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.environment import device_for, here
from gossamer.integrations.lightning import collectives
from gossamer.integrations.lightning.launched_job import LaunchedEnvironment, launched_job
from gossamer.train.engine.parameter_check import Verify
from gossamer.train.session.attach import attach
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.reporting import RecordOption
from gossamer.train.world import init


class JoinedStrategy:
    """What the strategies of the Trainer and of Fabric have in common, before Lightning's DDPStrategy."""

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
        """recipe, clip_norm, verify, verify_every, record, log_to: as gossamer.attach. options: those of every
        strategy of Lightning's, such as accelerator or checkpoint_io. Raises AttachError in an elastic run."""
        job = launched_job()
        if job is not None:
            options.setdefault("cluster_environment", LaunchedEnvironment(job))
        super().__init__(**options)
        if strange := ", ".join(self._ddp_kwargs):  # type: ignore[attr-defined]
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

    # -- places, of which Lightning's own strategy knows the rest -----------------------------------------------------

    cluster_environment: Any
    parallel_devices: list[torch.device]
    world_size: int
    global_rank: int
    local_rank: int
    num_processes: int

    @property
    def root_device(self) -> torch.device:
        """Where this worker computes: its own of `devices`, or its own of this machine where they are fewer."""
        devices = self.parallel_devices
        if devices[0].type == "cpu":
            return devices[0]
        return devices[self.local_rank] if self.local_rank < len(devices) else device_for(here())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        """Lightning starts the workers where nobody has, and there are several."""
        if not isinstance(self.cluster_environment, LaunchedEnvironment) and self.world_size > 1:
            super()._configure_launcher()  # type: ignore[misc]

    def _join(self) -> None:
        """Join the job, as gossamer.init does; where Lightning has started the workers, tell them their ranks."""
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
        """(world, *shape). sync_grads: by torch's collective, whose backward averages."""
        if sync_grads and self.world_size > 1:
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
            return gathered
        return collectives.all_gather(tensor)
