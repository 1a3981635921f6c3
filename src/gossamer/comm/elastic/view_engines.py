"""View engines: one worker's engines between GPUs, a new one per view, and never two at once.

When the members change, the previous engine is aborted, because its kernels may wait for a lost member. Then another
engine is formed for the new view's mesh, through a store that has served no other. The previous engine's memory is
only released once the new one is formed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from gossamer import events
from gossamer.base.ops import AllGather, AllReduceMean, CollectiveOp, Payload, SimpleOp
from gossamer.base.units import first_line
from gossamer.comm.communicator import Communicator
from gossamer.comm.device_wait import DeviceWait, Peers
from gossamer.comm.environment.listening import listen_as
from gossamer.comm.environment.tcp_store import hosted_store, remote_store
from gossamer.comm.environment.wait_timeout import timeout_seconds
from gossamer.comm.mesh.device_transport import DeviceTransport
from gossamer.comm.mesh.transport import MeshTransport
from gossamer.comm.packing import into, join, split

# Errors are raised in `wait`. Otherwise torch's watchdog would end the process for them
OWN_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def nccl_group(store: Store, rank: int, world: int, device: torch.device) -> Any:
    """Form an NCCL group over a fresh store. Collective call; it returns once all ranks are connected."""
    os.environ.setdefault(*OWN_ERROR_HANDLING)
    torch.cuda.set_device(device)  # of the thread that forms the group
    group = dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
    group._set_sequence_number_for_group()
    group.eager_connect_single_device(device)
    return group


class ViewEngine:
    """One view's engine. group: torch's process group; seconds: time limit of an operation while all members live."""

    takes_devices = True

    def __init__(self, group: Any, world: int, peers: Peers, seconds: float) -> None:
        self._group, self.world = group, world
        self._communicator = Communicator(group.abort, DeviceWait(peers), seconds)

    def serves(self, op: SimpleOp, whole: bool) -> bool:
        return whole and (
            (isinstance(op, AllGather) and op.forms is None)
            or (isinstance(op, AllReduceMean) and op.tensor.is_floating_point())
        )

    def watched_by(self, peers: Peers) -> None:
        self._communicator.watched_by(DeviceWait(peers))

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        match op:
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out)
            case AllGather(payload):
                return self._gather(payload)
            case _:
                raise AssertionError(f"a view's engine does not support {op}")

    def _mean(self, tensor: Tensor, out: Tensor | None) -> Callable[[], Tensor]:
        mean = into(out if out is not None and out.is_contiguous() else None, tensor.contiguous())
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.AVG  # type: ignore[assignment]
        work = self._communicator.begin(lambda: self._group.allreduce([mean], options))

        def wait() -> Tensor:
            self._communicator.finish([work])
            return mean if out is None or out.is_contiguous() else out.copy_(mean)

        return wait

    def _gather(self, payload: Payload) -> Callable[[], list[Payload]]:
        joint = join(payload)
        received = joint.new_empty(self.world * joint.numel())
        work = self._communicator.begin(lambda: self._group._allgather_base(received, joint, AllgatherOptions()))

        def wait() -> list[Payload]:
            self._communicator.finish([work])
            return [split(part, payload) for part in received.view(self.world, -1)]

        return wait

    def abort(self) -> None:
        """Abort operations, which may wait for lost members. Blocks until they have ended."""
        self._communicator.abort()

    def close(self) -> None:
        """Abort without waiting for torch. May be called by any thread, including the one that sends heartbeats."""
        threading.Thread(target=self.abort, name="gossamer-abort", daemon=True).start()


PATIENCE = timedelta(seconds=60)  # to form an engine; after that the mesh alone is used
REFUSED = "none could be formed before"

Form = Callable[[Store, int, int, torch.device], Any]


class MeshOfView(Protocol):
    """The channel between members before they have an engine."""

    rank: int
    world: int

    @property
    def peers(self) -> Peers: ...
    def all_gather_text(self, text: str) -> list[str]: ...


class ViewEngines:
    """Creates the engines of successive views.

    Args:
        device: Device of this worker.
        address: Address on which this worker listens.
        form: Forms torch's group of a view; collective call.
    """

    def __init__(self, device: torch.device, address: str, form: Form) -> None:
        self._device, self._address, self._form = device, address, form
        self._now: ViewEngine | None = None
        self._refused = ""  # after one failure, caused by a machine's configuration, no further attempt is made

    def combine(self, mesh: MeshTransport) -> MeshTransport | DeviceTransport:
        """Combine a new view's mesh with an engine, if all members can form one. Collective call.

        Raises PeerLost, and closes the mesh, if a member leaves meanwhile.
        """
        try:
            engine = self.of(mesh)
            nodes = ("",) * mesh.world  # views have no subgroups, so timings within nodes are not needed
            return mesh if engine is None else DeviceTransport.of(mesh, engine, self._device, nodes)
        except BaseException:
            mesh.close()
            raise

    def of(self, mesh: MeshOfView) -> ViewEngine | None:
        """Form a new view's engine; None on all members if one of them cannot. Collective call.

        Raises PeerLost with the lost members if one leaves meanwhile.
        """
        before = self._retired()  # referenced until this returns: torch would destroy it at an arbitrary time
        held, port, problem = self._held() if mesh.rank == 0 else (None, 0, self._refused)
        declarations = mesh.all_gather_text(json.dumps([problem, self._address, port]))
        problems, addresses, ports = zip(*map(json.loads, declarations), strict=True)
        if not any(problems):
            remote = partial(remote_store, addresses[0], ports[0], timeout=PATIENCE)
            problem = self._formed(mesh, remote if held is None else lambda: held)
            problems = tuple(mesh.all_gather_text(problem))
        if any(problems):
            self._refuse(next(filter(None, problems)), gives_notice=mesh.rank == 0)
        del before
        return self._now

    def _retired(self) -> ViewEngine | None:
        before, self._now = self._now, None
        if before is not None:
            before.abort()
        return before

    def _refuse(self, why: str, gives_notice: bool) -> None:
        self._retired()
        if gives_notice and not self._refused:
            events.notice(f"no NCCL between the GPUs of this run ({why}): they exchange through their hosts' memory")
        self._refused = REFUSED

    def _held(self) -> tuple[Store | None, int, str]:
        """Open a store for one view's members in this worker, and return it and its port; or return the error."""
        if self._refused:
            return None, 0, self._refused
        try:
            listener = listen_as(self._address, 0, several_machines=False, interface_address=None)
            port = int(listener.getsockname()[1])
            return hosted_store(self._address, listener, timeout=PATIENCE), port, ""
        except (OSError, RuntimeError) as failure:
            return None, 0, first_line(failure)

    def _formed(self, mesh: MeshOfView, store: Callable[[], Store]) -> str:
        """Form the engine; return the error, or an empty text. The thread that forms it is abandoned if it blocks on a
        lost member."""
        forming: Future[Any] = Future()

        def form() -> None:
            try:
                forming.set_result(self._form(store(), mesh.rank, mesh.world, self._device))
            except Exception as failure:  # an engine may raise any class
                forming.set_exception(failure)

        threading.Thread(target=form, name="gossamer-nccl", daemon=True).start()
        formed = False
        try:
            formed = DeviceWait(mesh.peers).until(forming.done, PATIENCE.total_seconds())
        finally:
            if not formed:
                forming.add_done_callback(_abort_late)
        if not formed:
            return f"none within {PATIENCE.total_seconds():g} s"
        if (failure := forming.exception()) is not None:
            return first_line(failure)
        self._now = ViewEngine(forming.result(), mesh.world, mesh.peers, timeout_seconds())
        return ""


def _abort_late(forming: Future[Any]) -> None:
    """Abort a group that was formed after the timeout."""
    with suppress(Exception):
        forming.result().abort()
