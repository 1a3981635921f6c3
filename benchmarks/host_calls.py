"""Host calls: what of a training step would make the host wait for a GPU, by recipe, thread and kind. Needs no GPU.

    python benchmarks/host_calls.py [--recipe R ...] [--json FILE]

Two workers train a small model: one on the fake accelerator of benchmarks/fake_accelerator.py, the other on the CPU.
A number that is read, a tensor that is copied to or from the host, and an allocation whose size follows from data are
counted after the first steps. On the training thread (and autograd's thread of the device, where hooks run) there
should be none, or the GPU runs dry; the communication thread may wait, for its own stream.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import fake_accelerator  # found only after the line above
from benchmarks.fake_accelerator import KINDS, HostCall

from gossamer.algorithms.compressors.ownership import UpdateRule
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.ops import AllReduceMean, AllToAll, Coalesced, CollectiveOp, InGroup
from gossamer.comm.simulated import SimulatedGroup
from gossamer.train.engine.bucket import slot_of
from gossamer.train.session.session import Session
from gossamer.train.world_state import WorldState

WARM, COUNTED = 5, 8  # steps; every fourth compares a part of the parameters
COMMUNICATION = "gossamer-comm"
RECIPES = (
    "Dense()",
    "Dense(dtype='bfloat16')",
    "Int8()",
    "Float4()",
    "TopK(density=0.1)",
    "Threshold(value=0.01)",
    "DGC(density=0.1)",
    "PowerSGD(rank=2)",
    "QSGD()",
    "OneBit()",
    "TernGrad()",
    "RandomK(density=0.1)",
    "Feedback(TopK(density=0.1))",
    "Chain(TopK(density=0.1), Int8())",
    "Rotated(Int8())",
    "SharedMask(density=0.1)",
    "ARCTopK(density=0.1, row=8)",
    "Warmup(TopK(density=0.05))",
    "Adaptive(TopK(density=0.1))",
    "Sharded(Int8())",
    "SparseSum(TopK(density=0.1))",
    "OneBitAdam(warmup=2)",
    "DeMo()",
    "EveryStep(delay=1) + Int8()",
    "EveryStep(accumulate=2) + TopK(density=0.1)",
    "LocalSGD(period=2)",
    "LocalSGD(period=2) + Int8()",
    "DiLoCo(period=2)",
    "DelayedAveraging(delay=1)",
    "DiLoCo(period=4, fragments=2, delay=1) + Int8()",
    "PostLocalSGD(period=2, start=3)",
    "Gossip()",
    "Gossip() + TopK(density=0.1)",
)


class HostBoundary:
    """A transport whose group meets on the host: tensors go there and come back on the communication thread."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.world, self.links = inner.rank, inner.world, inner.links

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        answer = self._inner.begin(op.map(lambda tensor: tensor.to("cpu")))
        return lambda: _delivered(op, answer())

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        there = [tensor.to("cpu") for tensor in tensors]
        self._inner.broadcast_(there, source)
        for tensor, heard in zip(tensors, there, strict=True):
            tensor.copy_(heard)

    def part(self, size: int) -> HostBoundary:
        return HostBoundary(self._inner.part(size), self._device)


def _delivered(op: CollectiveOp, answer: Any) -> Any:
    """An answer from the host, where the operation's own tensors are."""
    match op:
        case Coalesced(ops):
            return [_delivered(each, theirs) for each, theirs in zip(ops, answer, strict=True)]
        case InGroup(_, inner):
            return _delivered(inner, answer)
        case AllReduceMean(tensor, out):
            return answer.to(tensor.device) if out is None else out.copy_(answer)
        case AllToAll(parts):
            like = parts[0]
        case _:
            like = op.tensors()
    return [tuple(each.to(mine.device) for each, mine in zip(theirs, like, strict=True)) for theirs in answer]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def train(
    rank: int,
    group: SimulatedGroup,
    recipe: str,
    accelerator: torch.device,
    count: Callable[[Callable[[], None]], None],
) -> None:
    """The steps of one worker; `count` is given what is counted. Rank 0 is the one on the accelerator: two of them in
    one process would wait for each other on autograd's one thread of the device."""
    device = accelerator if rank == 0 else torch.device("cpu")
    plain: Any = group.transports[rank]
    transport = HostBoundary(plain, device) if rank == 0 else plain
    here = model().to(device)
    resolved = resolve(recipe, world=group.world)
    owned = [resolved.compressor.owns_momentum(slot_of(*named)) for named in here.named_parameters()]
    owners = [owner for owner in owned if owner is not None]
    kind: Any = owners[0].optimizers[0] if owners else torch.optim.AdamW
    options = {"momentum": 0.9} if owners and owners[0].rule is UpdateRule.VELOCITY else {}
    optimizer = kind(here.parameters(), lr=0.01, **options)
    clip_norm = None if owners else 1.0
    world = WorldState(rank=rank, size=transport.world, local_rank=rank, device=device)
    session = Session(here, optimizer, resolved, transport, world=world, clip_norm=clip_norm)
    draw = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, 12, generator=draw).to(device) for _ in range(WARM + COUNTED)]

    def steps(numbers: Sequence[int]) -> None:
        for number in numbers:
            loss = here(batches[number]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss)

    steps(range(WARM))
    count(lambda: steps(range(WARM, WARM + COUNTED)))
    session.close()


def host_calls(recipe: str) -> list[HostCall]:
    """All that rank 0 would have waited for. Raises what its training raises."""
    found: list[HostCall] = []
    run_both(recipe, fake_accelerator.register(), lambda work: found.extend(fake_accelerator.counted(work)))
    return found


def run_both(recipe: str, accelerator: torch.device, count: Callable[[Callable[[], None]], None]) -> None:
    """Train with two workers, of which rank 0 gives `count` its later steps. Raises what training raises."""
    group, failures = SimulatedGroup(2), list[BaseException]()

    def run(rank: int) -> None:
        try:
            train(rank, group, recipe, accelerator, count if rank == 0 else lambda work: work())
        except BaseException as failure:
            failures.append(failure)
            group.leave()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def on_training_threads(calls: Sequence[HostCall]) -> list[HostCall]:
    """Those that hold up the training loop, or autograd's thread of the device."""
    return [call for call in calls if not call.thread.startswith(COMMUNICATION)]


def row(recipe: str, calls: Sequence[HostCall]) -> str:
    """A line of the table, and one for each place on the training thread."""
    mine = on_training_threads(calls)
    kinds, beside = Counter(call.kind for call in mine), (len(calls) - len(mine)) / COUNTED
    line = f"| `{recipe}` | " + " | ".join(f"{kinds[kind]}" for kind in KINDS) + f" | {beside:.1f} |"
    places = Counter((call.kind, call.place) for call in mine).most_common()
    return "\n".join([line, *(f"    {times} x {kind} at {place}" for (kind, place), times in places)])


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    record: dict[str, Any] = {}
    print(f"In {COUNTED} steps on the training thread, by kind; and on the communication thread, a step:\n")
    print(f"| recipe | {' | '.join(KINDS)} | communication thread |\n|---|{'---:|' * (len(KINDS) + 1)}")
    for recipe in args.recipe or RECIPES:
        calls = host_calls(recipe)
        record[recipe] = [vars(call) for call in calls]
        print(row(recipe, calls), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="What of a training step makes the host wait for a GPU.")
    options.add_argument("--recipe", action="append", help="one of several; all kinds where none is given")
    options.add_argument("--json", type=Path, metavar="FILE", help="every call that was counted")
    main(options.parse_args())
