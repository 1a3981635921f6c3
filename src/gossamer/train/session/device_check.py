"""Device check: tells, before training, of models that do not lie where their worker computes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from gossamer.errors import AttachError
from gossamer.events import notice
from gossamer.train.engine.parameter_views import trainable


def check_devices(model: nn.Module, own: torch.device, workers: int) -> None:
    """Say what is slower than it could be. own: the worker's device. workers: of the job.

    Layers of one model may lie on several devices. Raises AttachError for a model on another worker's GPU.
    """
    devices = {parameter.device for parameter in trainable(model).values()}
    _refuse_anothers(devices, own, workers)
    if own.type != "cpu" and {device.type for device in devices} == {"cpu"}:
        notice(
            f"the model is in the host's memory and this worker has {own}, which stays idle. Write "
            "model.to(world.device) before the optimizer and gossamer.attach; or CUDA_VISIBLE_DEVICES= before the "
            "command, to train on processors with connections that are made for them."
        )


def _refuse_anothers(devices: Collection[torch.device], own: torch.device, workers: int) -> None:
    there = {device for device in devices if device.type == own.type}
    if workers > 1 and own.index is not None and there and own not in there:
        where = ", ".join(sorted(map(str, there)))
        raise AttachError(
            f"the model is on {where} and this worker's own device is {own}: workers of one machine would share one "
            "GPU, on which NCCL serves a single rank, and leave the others idle. Write model.to(world.device) before "
            "the optimizer and gossamer.attach, or torch.cuda.set_device(world.device) before model.cuda()."
        )
