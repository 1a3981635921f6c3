"""View engine: operations between devices (NCCL) of one view's members, over a communicator of the view's own.

Means and gathers of all members; what else they ask goes by the mesh, staged, and so does what is no float.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from gossamer.base.ops import AllGather, AllReduceMean, CollectiveOp, Payload
from gossamer.comm.communicator import Communicator
from gossamer.comm.mesh.operations import SimpleOp
from gossamer.comm.packing import into, join, split
from gossamer.comm.peer_watch import Peers, PeerWatch


class ViewEngine:
    """group: torch's, of this view alone; seconds: how long an operation may take while all members are there."""

    takes_devices = True

    def __init__(self, group: Any, world: int, peers: Peers, seconds: float) -> None:
        self._group, self.world = group, world
        self._communicator = Communicator(group.abort, PeerWatch(peers), seconds)

    def serves(self, op: SimpleOp, whole: bool) -> bool:
        return whole and (
            isinstance(op, AllGather) or (isinstance(op, AllReduceMean) and op.tensor.is_floating_point())
        )

    def watched_by(self, peers: Peers) -> None:
        self._communicator.watched_by(PeerWatch(peers))

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        match op:
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out)
            case AllGather(payload):
                return self._gather(payload)
            case _:
                raise AssertionError(f"a view's engine does not serve {op}")

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
        heard = joint.new_empty(self.world * joint.numel())
        work = self._communicator.begin(lambda: self._group._allgather_base(heard, joint, AllgatherOptions()))

        def wait() -> list[Payload]:
            self._communicator.finish([work])
            return [split(part, payload) for part in heard.view(self.world, -1)]

        return wait

    def abort(self) -> None:
        """Give up on what is under way, as it may wait for members who are gone; it is over when this returns."""
        self._communicator.abort()

    def close(self) -> None:
        """Have it aborted, without waiting for torch. Any thread may: also one by which this worker shows that it
        lives."""
        threading.Thread(target=self.abort, name="gossamer-abort", daemon=True).start()
