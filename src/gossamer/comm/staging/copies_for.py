"""Copies for a device: which implementation serves it, made once for each device of this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from gossamer.comm.staging.cuda_copies import CudaCopies
from gossamer.comm.staging.device_copies import DeviceCopies
from gossamer.comm.staging.host_copies import HostCopies
from gossamer.errors import GossamerError

_KINDS: dict[str, Callable[[torch.device], DeviceCopies]] = {"cuda": CudaCopies, "cpu": lambda _: HostCopies()}


@cache
def copies_for(device: torch.device) -> DeviceCopies:
    """The copies of tensors of this device. Raises GossamerError for a kind of device that has none."""
    if device.type not in _KINDS:
        raise GossamerError(
            f"tensors on {device} cannot be sent: copies beside the computing are written for {', '.join(_KINDS)} "
            'only. Train on one of these: model.to("cpu").'
        )
    return _KINDS[device.type](device)
