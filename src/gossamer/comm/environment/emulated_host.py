"""Emulated host: the network namespace of one process of a run on an emulated network."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from gossamer.base.run_files import NETWORK_NAMESPACE
from gossamer.errors import ConnectError

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
ERRORS_ONLY = 2

T = TypeVar("T")


def enter_host() -> None:
    """Move this process to its emulated host, if it has one. Call it before the process opens sockets.

    Threads inherit the namespace of the thread that starts them; threads that run already stay outside.

    Raises:
        ConnectError: the namespace does not exist, or this process may not enter it.
    """
    if network := os.environ.get(NETWORK_NAMESPACE):
        silence_torch()
        try:
            _enter(Path(network))
        except OSError as problem:
            raise ConnectError(
                f"This process cannot enter its emulated host: {problem}. The host exists as long as the `gossamer run "
                "--network` that made it. Start the run again."
            ) from None


def in_namespace(network: Path, action: Callable[[], T]) -> T:
    """Run an action in a network namespace, in a short-lived thread: sockets belong to their thread's namespace."""

    def enter_and_act() -> T:
        _enter(network)
        return action()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter_and_act).result()


def silence_torch() -> None:
    """Silence torch's warning about every peer address without a name, as all are on an emulated network.

    torch reads TORCH_CPP_LOG_LEVEL at its import, which is over, so this sets the level in the library. If a version of
    torch stores the level elsewhere, the warnings appear.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):
            engine = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(engine, "FLAGS_caffe2_log_level").value = ERRORS_ONLY


def _enter(network: Path) -> None:
    with network.open("rb") as file:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(network))
