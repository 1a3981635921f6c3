"""Process group transport: collective operations over torch.distributed, by Gloo on CPUs or NCCL on GPUs.

NCCL's operations are awaited through communicator, which detects dead peers. The NCCL part has not run on GPUs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NoReturn, Protocol, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.base.kernels import half_decode, scratch_like
from gossamer.base.layout import bytes_of
from gossamer.base.op_semantics import rank_order_mean
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
    SimpleOp,
    payload_bytes,
)
from gossamer.comm.communicator import Communicator
from gossamer.comm.device_wait import DeviceWait, Peers
from gossamer.comm.environment.rendezvous import gone
from gossamer.comm.environment.wait_progress import Missing, WaitProgress, named_ranks
from gossamer.comm.environment.wait_timeout import VARIABLE, duration, engine_timeout, timeout_seconds
from gossamer.comm.packing import into, join, moved, split
from gossamer.errors import ConnectError, PeerLost

Begin = Callable[[Any], Callable[[], Any]]


def through_host(op: SimpleOp, begin: Begin, place: int) -> Callable[[], Any]:
    """Begin an operation with `begin`, which only accepts CPU tensors. place: index of this rank in its group."""
    wait = begin(op.map(Tensor.cpu))
    return lambda: _like_input(op, wait(), place)


def _like_input(op: SimpleOp, answer: Any, place: int) -> Any:
    match op:
        case AllReduceMean(tensor, out):
            return answer.to(tensor.device) if out is None else out.copy_(answer)
        case AllToAll(parts):
            return [moved(payload, parts[place]) for payload in answer]
        case AllGather(payload) | NeighborAllGather(payload):
            return [moved(remote, payload) for remote in answer]
        case _:
            assert_never(op)


BUSY = (
    "Such a rank is still loading data or building its model, has failed, or never calls it: check its output. Every "
    "rank must call it, not only if world.is_first; a rank that trains in an earlier session waits for this one."
)
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.002, 0.1


class KeyStore(Protocol):
    """The store through which torch formed the group."""

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...


class ArrivalRoll:
    """The ranks that have reached one barrier, recorded in a store. name: the barrier's, equal on every rank."""

    def __init__(self, store: KeyStore, name: str, rank: int, world: int) -> None:
        self._store, self._name, self._rank, self._world = store, name, rank, world

    def enter(self) -> None:
        self._store.set(self._key(self._rank), "1")
        if self._store.add(self._key("entered"), 1) == self._world:
            self._store.set(self._key("all"), "1")

    @property
    def complete(self) -> bool:
        """Whether all have entered; one request to the store, regardless of the number of ranks."""
        return self._has_entered("all")

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._world) if not self._has_entered(rank)]

    @property
    def is_first_here(self) -> bool:
        """Whether this is the lowest rank that has arrived, which reports for all."""
        return not any(self._has_entered(rank) for rank in range(self._rank))

    def _has_entered(self, who: int | str) -> bool:
        return self._store.check([self._key(who)])

    def _key(self, who: int | str) -> str:
        return f"gossamer/{self._name}/{who}"


def monitored_barrier(
    roll: ArrivalRoll,
    progress: WaitProgress,
    gone: Callable[[], str] = lambda: "",
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all ranks have entered the roll.

    Implemented outside of torch: its barrier neither names missing ranks nor reacts to Ctrl-C.

    Args:
        roll: The ranks that have arrived.
        progress: Reports the wait.
        gone: Names a rank that has left, or returns an empty text.
        sleep: Replaced in tests.

    Raises:
        PeerLost: A rank has left; raised at once.
        ConnectError: Ranks did not arrive in time.
    """

    def missing() -> Missing | None:
        return Missing(named_ranks(ranks), BUSY) if roll.is_first_here and (ranks := roll.missing) else None

    def check_gone() -> None:
        if who := gone():
            raise PeerLost(
                f"{who} left while rank {progress.rank} waited for all ranks to reach {progress.place}, so the group "
                "is broken. Check that rank's output for the cause."
            )

    def complete() -> bool:
        try:
            return roll.complete
        except RuntimeError:  # the store ends with the process that hosts it
            check_gone()
            raise

    roll.enter()
    pause = POLL_SECONDS
    while not complete():
        check_gone()
        progress.look(missing)
        if progress.over and (ranks := roll.missing):
            raise ConnectError(
                f"{named_ranks(ranks)} did not reach {progress.place} within {duration(progress.seconds)}, but "
                f"all ranks are required. {BUSY} To wait longer, set "
                f"{VARIABLE}=7200 (seconds) for every worker."
            )
        sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)
    progress.end()


# torch 2.13 renamed it and warns about the old name
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_barriers = count()  # of this process; equal on all ranks
SMALL_BYTES = 2**20  # largest mean with a direct exchange: its time is mostly latency


class ProcessGroupTransport:
    """Collective operations over a separate process group, so that the user's operations cannot interfere.

    Every rank of the default group must create one, each for its own subgroup. Raises PeerLost when the group breaks.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        """Create the process group; a collective call.

        ranks: ranks of the default group, ascending, that form a group with this one; None for all. `rank` and `world`
        refer to this group; `groups` has the ranks of all groups that are created in this call.
        """
        self._install(range(dist.get_world_size()), dist.group.WORLD)
        self._await_all()
        # Detects at once a rank that has failed before; new_group would block
        outgoing = self.all_gather_text(json.dumps(list(self._ranks if ranks is None else ranks)))
        self.groups = sorted({tuple(json.loads(text)) for text in outgoing})
        # Every rank participates in the creation of all groups
        made = {each: dist.new_group(list(each), timeout=engine_timeout()) for each in self.groups}
        local = tuple(json.loads(outgoing[self.rank]))
        self._install(local, made[local])

    def _install(self, ranks: Sequence[int], group: Any) -> None:
        """Use a group of these ranks of the default group."""
        self._ranks, self._group = tuple(ranks), group
        self.takes_devices = _is_nccl(group)  # whether the engine accepts device tensors
        self.rank, self.world = self._ranks.index(dist.get_rank()), len(self._ranks)
        watch = DeviceWait(MeetingPeers(self.rank, self.world))
        self._communicator = Communicator(partial(_abort, group), watch, timeout_seconds())
        self._parts: list[ProcessGroupTransport] = []
        self.links = ""

    def serves(self, op: SimpleOp, whole: bool) -> bool:
        """Whether the engine supports an operation: all of them, on all ranks or a subgroup."""
        return True

    def watched_by(self, peers: Peers) -> None:
        """From now on, abort device operations when one of these peers is lost, instead of ranks of the meeting."""
        self._communicator.watched_by(DeviceWait(peers))

    def _await_all(self) -> None:
        with self._translated():
            store = dist.distributed_c10d._get_default_store()
            roll = ArrivalRoll(store, f"attach {next(_barriers)}", self.rank, self.world)
            monitored_barrier(roll, WaitProgress(self.rank, "gossamer.attach()", timeout_seconds()), gone)

    def part(self, size: int) -> ProcessGroupTransport:
        first = self.rank - self.rank % size
        self._parts.append(ProcessGroupTransport(self._ranks[first : first + size]))
        return self._parts[-1]

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        with self._translated():
            answered = self._start(op)

        def wait() -> Any:
            with self._translated():
                return answered()

        return wait

    def _start(self, op: CollectiveOp) -> Callable[[], Any]:
        match op:
            case Coalesced(ops):
                waiting = [self._start(each) for each in ops]
                return lambda: [wait() for wait in waiting]
            case InGroup(ranks, inner):
                return self._here(inner, partial(self._among, ranks), ranks.index(self.rank))
            case _:
                return self._here(op, self._of_all, self.rank)

    def _here(self, op: SimpleOp, begin: Callable[[Any], Callable[[], Any]], place: int) -> Callable[[], Any]:
        """Begin an operation directly if the engine accepts its tensors, else through host memory."""
        if isinstance(op, AllReduceMean) and (out := op.out) is not None and not out.is_contiguous():
            wait = self._here(replace(op, out=None), begin, place)
            return lambda: out.copy_(wait())
        if all(tensor.is_cpu for tensor in op.tensors()) or self.takes_devices:
            return begin(op)
        return through_host(op, begin, place)

    def _of_all(self, op: SimpleOp) -> Callable[[], Any]:
        match op:
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out)
            case AllGather(payload) if payload[0].is_cuda and op.forms is None:
                return self._all_gathered(join(payload), payload)
            case _:
                return self._among(range(self.world), op)

    def _among(self, ranks: Sequence[int], op: CollectiveOp) -> Callable[[], Any]:
        """Begin an operation of a subgroup, as point-to-point messages of the whole group, most of them empty."""
        match op:
            case AllReduceMean(tensor, out):
                return self._direct_mean(into(out, tensor), ranks)
            case AllGather(payload):
                joint, likes = join(payload), op.meta_answer(len(ranks), ranks.index(self.rank))
                return self._sent(dict.fromkeys(ranks, joint), joint, list(zip(ranks, likes, strict=True)))
            case AllToAll(parts):
                outgoing = {peer: join(part) for peer, part in zip(ranks, parts, strict=True)}
                likes = op.meta_answer(len(ranks), ranks.index(self.rank))
                return self._sent(outgoing, outgoing[self.rank], list(zip(ranks, likes, strict=True)))
            case NeighborAllGather(payload):
                joint = join(payload)
                outgoing = {ranks[peer]: joint for peer in op.receivers}
                return self._sent(outgoing, joint, [(ranks[peer], payload) for peer in op.senders])
            case InGroup() | Coalesced():
                raise AssertionError("InGroup cannot contain Coalesced; build Coalesced((InGroup(...), ...)) instead.")

    def _sent(
        self, outgoing: dict[int, Tensor], local: Tensor, likes: Sequence[tuple[int, Payload]]
    ) -> Callable[[], list[Payload]]:
        """Send `outgoing[j]` to rank j. likes: sender and layout of each result; this rank's own is `local`."""
        incoming = {peer: local if peer == self.rank else local.new_empty(payload_bytes(like)) for peer, like in likes}
        everyone = range(self.world)
        arrived = self._straight([outgoing.get(peer) for peer in everyone], [incoming.get(peer) for peer in everyone])

        def wait() -> list[Payload]:
            arrived()
            return [split(incoming[peer], like) for peer, like in likes]

        return wait

    def _mean(self, tensor: Tensor, out: Tensor | None) -> Callable[[], Tensor]:
        mean = into(out, tensor)
        if mean.is_cuda:
            return self._all_reduced(mean, dist.ReduceOp.AVG)
        divides = mean.is_floating_point() or mean.is_complex()  # a sum of integers cannot be divided in place
        if mean.dtype.itemsize < 4 or mean.nbytes <= SMALL_BYTES or not divides:
            return self._direct_mean(mean, range(self.world))
        return self._all_reduced(mean, dist.ReduceOp.SUM)

    def _all_reduced(self, mean: Tensor, operation: Any) -> Callable[[], Tensor]:
        done = self._begun(mean, lambda: [dist.all_reduce(mean, op=operation, group=self._group, async_op=True)])

        def wait() -> Tensor:
            done()
            return mean.div_(self.world) if operation == dist.ReduceOp.SUM else mean

        return wait

    def _direct_mean(self, mean: Tensor, ranks: Sequence[int]) -> Callable[[], Tensor]:
        """Send each part directly to its owner, which sums in at least float32 and sends the mean to all ranks.

        This takes two hops instead of a ring's many, with the same number of bytes. In half precision, the engine's own
        sum would round at every hop, and overflow in float16.
        """
        cut = mean.view(-1).tensor_split(len(ranks))
        parts = {peer: part.view(torch.uint8) for peer, part in zip(ranks, cut, strict=True)}
        piece = cut[ranks.index(self.rank)]
        contributions = piece.new_empty((len(ranks), piece.numel()))
        rows = {peer: row.view(torch.uint8) for peer, row in zip(ranks, contributions, strict=True)}
        everyone = range(self.world)
        arrived = self._straight([parts.get(peer) for peer in everyone], [rows.get(peer) for peer in everyone])

        def wait() -> Tensor:
            arrived()
            _average(contributions, piece)
            answers = [parts.get(peer) for peer in everyone]
            self._straight([parts[self.rank] if peer in parts else None for peer in everyone], answers)()
            return mean

        return wait

    def _all_gathered(self, joint: Tensor, like: Payload) -> Callable[[], list[Payload]]:
        joint_payloads = joint.new_empty(self.world * joint.numel())
        done = self._begun(joint, lambda: [_all_gather(joint_payloads, joint, group=self._group, async_op=True)])

        def wait() -> list[Payload]:
            done()
            return [split(part, like) for part in joint_payloads.view(self.world, -1)]

        return wait

    def _straight(self, outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> Callable[[], None]:
        """Send the bytes `outgoing[j]` to rank j, and receive those of rank j in `incoming[j]`, all in one hop."""
        local, into_own = outgoing[self.rank], incoming[self.rank]
        if local is not None and into_own is not None and into_own.data_ptr() != local.data_ptr():
            into_own.copy_(local)
        others = [(self.rank + step) % self.world for step in range(1, self.world)]
        moves = [
            dist.P2POp(move, numbers, self._ranks[peer], self._group)
            for move, all_numbers in ((dist.irecv, incoming), (dist.isend, outgoing))
            for peer in others
            if (numbers := all_numbers[peer]) is not None and numbers.numel()
        ]
        return self._begun(moves[0].tensor, lambda: dist.batch_isend_irecv(moves)) if moves else lambda: None

    def _begun(self, tensor: Tensor, start: Callable[[], Sequence[Any]]) -> Callable[[], None]:
        """Begin the engine's work on tensors on this tensor's device. The returned function waits for it."""
        if tensor.is_cuda:
            works = self._communicator.begin(start)
            return lambda: self._communicator.finish(works)
        waiting = start()

        def wait() -> None:
            for work in waiting:
                work.wait()

        return wait

    def make_progress(self) -> bool:
        """Return False: the process group has its own threads."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        with self._translated(), torch.no_grad():
            for tensor in tensors:
                if not tensor.numel():
                    continue
                dense = (tensor if tensor.is_cpu or self.takes_devices else tensor.cpu()).contiguous()
                outgoing, sender = bytes_of(dense), self._ranks[source]
                self._begun(outgoing, partial(self._broadcast, outgoing, sender))()
                if dense is not tensor:
                    tensor.copy_(dense)

    def _broadcast(self, outgoing: Tensor, sender: int) -> Sequence[Any]:
        return [dist.broadcast(outgoing, sender, group=self._group, async_op=True)]

    def all_gather_text(self, text: str) -> list[str]:
        with self._translated():
            data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(self._device())
            (lengths,) = zip(*self._gathered(torch.tensor([data.numel()], device=data.device)), strict=True)
            longest = int(max(lengths))
            padded_texts = self._gathered(torch.nn.functional.pad(data, (0, longest - data.numel())))
        return [
            bytes(part[: int(length)].tolist()).decode().rstrip("\0")
            for (part,), length in zip(padded_texts, lengths, strict=True)
        ]

    def _gathered(self, tensor: Tensor) -> list[Payload]:
        payloads: list[Payload] = self._start(AllGather((tensor,)))()
        return payloads

    def _device(self) -> torch.device:
        """Device for small control tensors of this group."""
        only_cuda = "gloo" not in str(dist.get_backend_config(self._group))
        return torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")

    def close(self) -> None:
        for part in self._parts:
            part.close()
        if self._group is not None and not self._communicator.aborted and dist.is_initialized():
            dist.destroy_process_group(self._group)
            # Freed at once: garbage collection could run in a forked child without its threads, or during
            # interpreter shutdown, where the engine has been observed to abort.
        self._group = None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as failure:
            if self.takes_devices:
                self._communicator.abort()
            raise _broke(self.rank, self.world, str(failure)) from failure


class MeetingPeers:
    """All ranks, as far as the rendezvous meeting reports which ranks leave."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def hung_up(self) -> bool:
        return bool(gone())

    def break_off(self, why: str) -> NoReturn:
        raise _broke(self._rank, self._world, f"{who} has left" if (who := gone()) else why)


def _broke(rank: int, world: int, why: str) -> PeerLost:
    return PeerLost(
        f"the group broke while rank {rank} of {world} waited for an answer: another worker ended, "
        "failed, or could not be reached. Check its output for the reason. If it only ended its session, stop all "
        "ranks together: session.request_stop(). If ranks run out of data at different times, use "
        f"`with session.epoch():` around the loop over batches. ({why})"
    )


def _abort(group: Any) -> None:
    """Abort a group, except the default group, which belongs to the user; torch has no public function for it."""
    if group is not dist.group.WORLD:
        dist.distributed_c10d._abort_process_group(group)


def _is_nccl(group: Any) -> bool:
    return "nccl" in str(dist.get_backend_config(group))


def _average(contributions: Tensor, out: Tensor) -> None:
    """Mean of rows in rank order, as rank_order_mean computes it. contributions: (world, n); out: (n,)."""
    if contributions.is_cuda or contributions.dtype not in (torch.float16, torch.bfloat16):
        out.copy_(rank_order_mean(contributions.unbind()))
        return
    total = scratch_like(out, torch.float32)
    half_decode(contributions.unbind(), total, len(contributions))
    out.copy_(total)
