"""Meshes whose other ends are a test's own, and programs of a single row for them."""

from __future__ import annotations

import ctypes
import socket

import torch

from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.program import CODES, FORMATS, Does, Program
from gossamer.comm.mesh.sealing import LinkKeys
from gossamer.comm.mesh.stall_watchdog import StallTimeouts

FORM, TAG = 7, 5


def one_way(does: Does, peer: int, nbytes: int, form: int = FORM, tag: int = TAG) -> Program:
    """One piece of `nbytes`, in float32, which goes to a peer or comes from it."""
    return Program(
        rows=(ctypes.c_int32 * 5)(CODES[does], peer, 0, 0, tag),
        sizes=(ctypes.c_int64 * 1)(nbytes),
        offsets=(0,),
        form=form,
        format=FORMATS[torch.float32],
    )


class End:
    """A mesh of one rank, whose only connection is this test's."""

    def __init__(self, rank: int, keys: LinkKeys | None) -> None:
        mine, self.other = socket.socketpair()
        peer = 1 - rank
        ends = (mine, None) if rank else (None, mine)
        self.mesh = Mesh(rank, ends, StallTimeouts(timeout_seconds=5.0), keys=None if keys is None else {peer: keys})

    def begins(self, program: Program, x: torch.Tensor) -> int:
        return self.mesh.begin(program, [x.data_ptr()], x)

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.mesh.close()
        self.other.close()
