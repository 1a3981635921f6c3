"""Host description: versions, memory, GPUs and the interface that training would use."""

from __future__ import annotations

import os
import platform
import socket

import torch

from gossamer.base.kernels.library import missing_kernels
from gossamer.comm import environment
from gossamer.plan.doctor.report import HostReport
from gossamer.version import __version__

LOOPBACK = "127.0.0.1"


def describe(job: environment.JobEnvironment) -> HostReport:
    """This rank's host, on the interface that training would use."""
    interface, address = _interface(job)
    return HostReport(
        rank=job.rank,
        name=socket.gethostname(),
        address=address,
        interface=interface,
        gossamer=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        nccl=_nccl(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        load_average=os.getloadavg()[0],
        missing_kernels=missing_kernels(),
    )


def _interface(job: environment.JobEnvironment) -> tuple[str | None, str]:
    """Its name (None where the system tells none) and its address."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    interface = given or environment.choose_interface(job)
    address = environment.interfaces().get(interface) if interface else None
    return interface, address or _address_towards(job.master_address or LOOPBACK)


def _address_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a datagram socket sends nothing here: the kernel only picks the route
        return str(probe.getsockname()[0])


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
