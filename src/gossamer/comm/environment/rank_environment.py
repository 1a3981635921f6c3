"""Rank environment: versions, platform and settings of this process, for comparison between ranks.

SETTINGS lists the environment variables that are reported. Others, such as a token, never are.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

from gossamer.base.kernels.library import ABI, are_built
from gossamer.version import __version__

SETTINGS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "GLOO_SOCKET_IFNAME",
    "GOSSAMER_COLLECTIVE",
    "GOSSAMER_CONGESTION",
    "GOSSAMER_KERNELS",
    "GOSSAMER_SHARED_MEMORY",
    "GOSSAMER_THREADS",
    "GOSSAMER_TIMEOUT",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
MOST_CHARACTERS = 200  # of a setting


def rank_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return descriptions by name, without unset variables. Versions of torch are included if it is imported."""
    return {
        "python": platform.python_version(),
        "gossamer": __version__,
        **_of_torch(),
        "kernels": f"compiled, ABI {ABI}" if are_built() else "plain torch",
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "byte order": sys.byteorder,
        "cores": str(os.cpu_count() or 1),
        **{name: variables[name][:MOST_CHARACTERS] for name in SETTINGS if name in variables},
    }


def _of_torch() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["CUDA"] = str(torch.version.cuda)
    if torch.cuda.is_available() and hasattr(torch.cuda, "nccl"):
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions
