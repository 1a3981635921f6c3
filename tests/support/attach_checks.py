"""What real workers check about attach; run once per rank with the names of the checks as arguments."""

from __future__ import annotations

import json
import os
import pickle
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import findings, run_workers
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import AttachError, MismatchError, PeerLost
from gossamer.train.checkpoint import digest

unpickled: list[str] = []
sys.addaudithook(lambda event, args: unpickled.append(str(args)) if event == "pickle.find_class" else None)
world = gossamer.init()


def say(**findings: Any) -> None:
    """One line for the test that started this worker."""
    print("said", json.dumps(findings), flush=True)


class Training:
    """A small model under way; every rank starts from other weights and has its own data."""

    def __init__(self, recipe: Any = "TopK(0.2)") -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.session = gossamer.attach(self.model, self.optimizer, recipe)
        self._random = torch.Generator().manual_seed(world.rank)

    def step(self, inputs: Tensor | None = None) -> None:
        x = torch.randn(4, 6, generator=self._random) if inputs is None else inputs
        self.optimizer.zero_grad()
        mse_loss(self.model(x), x[:, :3]).backward()
        self.optimizer.step()

    def end(self) -> None:
        """All ranks hold the same bits, and these moved with every step."""
        digests = self.session._group.all_gather_text(digest(self.model.parameters()))
        assert len(set(digests)) == 1, f"ranks hold different bits after {self.session.steps} steps"
        self.session.close()


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuses_what_is_sharded_or_wrapped() -> None:
    """In a process group of one."""
    from torch.distributed.device_mesh import init_device_mesh  # half a second that the other checks can spare
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1)
    plain = nn.Linear(4, 3)
    wrapped = DistributedDataParallel(plain)
    with pytest.raises(AttachError, match=r"model = ddp\.module.*ddp\.register_comm_hook\(\*gossamer\.ddp_hook\("):
        gossamer.attach(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
    gossamer.attach(wrapped.module, torch.optim.SGD(wrapped.parameters(), 0.1)).close()
    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.Linear(4, 3)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh))
    with pytest.raises(AttachError, match=r'"weight" is a DTensor.*mesh=mesh\["replicate"\]'):
        gossamer.attach(sharded, torch.optim.SGD(sharded.parameters(), 0.1))
    sharded.weight = nn.Parameter(sharded.weight.full_tensor().detach())  # type: ignore[attr-defined]
    gossamer.attach(sharded, torch.optim.SGD(sharded.parameters(), 0.1)).close()


def says_how_it_was_refused() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()  # a rank that imports longer than the other does not count
    started = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        gossamer.attach(model, optimizer)
    say(seconds=time.monotonic() - started, message=str(caught.value))


def refuses_other_versions_and_serves_equal_ones() -> None:
    for where, what in ((torch, "__version__"), (platform, "python_version")):
        real = getattr(where, what)
        other = "9.8.7" if isinstance(real, str) else lambda: "9.8.7"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, what, other if world.rank == 1 else real)
            says_how_it_was_refused()
    training = Training()
    training.step()
    training.end()


def tells_once_whose_recipe_counts() -> None:
    heard: list[events.Event] = []
    stop = events.subscribe(heard.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_RECIPE", "Int8()")
        training = Training("TopK(0.2)")
    stop()
    training.step()
    training.end()
    assert training.session.recipe == resolve("Int8()")
    told = [event.message for event in heard if isinstance(event, events.Noticed)]
    assert [bool(re.search(r"Int8\(\).*replaces TopK\(0.2\)", each)) for each in told] == [True] * world.is_first


def refuses_ddp_around_what_is_attached() -> None:
    """DDP before or after attach; then each line that the error advises instead."""
    training = Training()
    with pytest.raises(AttachError, match="was made around this attached model"):
        DistributedDataParallel(training.model)
    training.step()
    training.end()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(6, 3))
    model, optimizer = ddp.module, torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(world.rank))

    def step(forward: nn.Module) -> Tensor:
        optimizer.zero_grad()
        forward(inputs).square().mean().backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    with gossamer.attach(model, optimizer, "TopK(0.2)") as session:
        with pytest.raises(AttachError, match="is about to run this attached model"):
            step(ddp)
        step(model)
        assert len(set(session._group.all_gather_text(digest([step(model)])))) == 1
    ddp.register_comm_hook(*gossamer.ddp_hook(ddp, "TopK(0.2)"))
    mine = step(ddp)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(mine, theirs)


# -- pickle ------------------------------------------------------------------------------------------------------------


def never_unpickles() -> None:
    """From init on, through attach, training, saving and loading; checked before anything else here uses pickle."""
    training = Training()
    for _ in range(3):
        training.step()
    folder = Path(os.environ["CHECKS_FOLDER"]) / "checkpoint"
    training.session.save(folder, epoch=1)
    assert training.session.load(folder) == {"epoch": 1}
    training.end()
    assert unpickled == []
    pickle.loads(pickle.dumps(Path("a")))
    assert unpickled, "the hook hears nothing, so that it heard nothing means nothing"


# -- forked children ---------------------------------------------------------------------------------------------------


def trains_beside_forked_loaders() -> None:
    """Each epoch forks a DataLoader's worker and lets it end, beside the communication thread and the group's."""
    training = Training()
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs)
    loader = DataLoader(
        data, batch_size=4, sampler=world.shard(data), num_workers=1, multiprocessing_context="fork", timeout=30
    )
    for _ in range(2):
        for (batch,) in loader:
            training.step(batch)
    training.step()
    assert training.session.steps == 7
    training.end()


def leaves_forked_children_alone() -> None:
    training = Training()
    before = training.session.steps
    _in_child(lambda: _alone(training))
    for _ in range(3):
        training.step()
    _in_child(training.session.close)
    training.step()
    assert training.session in open_sessions()
    assert training.session.steps == before + 4
    training.end()


def _alone(training: Training) -> None:
    """Trains and closes, as a child that knows nothing of the job would: a second rank 0 or 1 that spoke would hang."""
    heard: list[events.Event] = []
    events.subscribe(heard.append)
    weights = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.step()
    training.session.close()
    assert heard == []
    assert training.session.steps == 0
    moved = [not torch.equal(p, old) for p, old in zip(training.model.parameters(), weights, strict=True)]
    assert all(moved), "the child could not train by itself"


def _in_child(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is killed and fails the check
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"


# -- others ------------------------------------------------------------------------------------------------------------

SECOND_JOB = """
import json, time
import gossamer
from gossamer.errors import ConnectError
started = time.monotonic()
try:
    gossamer.init()
except ConnectError as error:
    print("said", json.dumps({"seconds": time.monotonic() - started, "message": str(error)}), flush=True)
    raise
"""


def keeps_its_port() -> None:
    """Rank 0 starts a second job at this one's meeting point, while rank 1 waits for it in its backward pass."""
    training = Training()
    if world.rank == 0:
        port = os.environ["MASTER_PORT"]
        for result in run_workers(["-c", SECOND_JOB], 2, extra={"MASTER_PORT": port}, timeout_seconds=100):
            assert result.returncode == 1, result.stdout
            (heard,) = findings(result.stdout)
            assert heard["seconds"] < 20, heard
            assert f"127.0.0.1:{port}" in heard["message"]
            assert "MASTER_PORT=<a free port>" in heard["message"]
    for _ in range(2):
        training.step()
    training.end()


def misses_a_peer_that_ends_early() -> None:
    """Rank 1 leaves its loop after two batches and has nothing more to do; the last check, since its process ends."""
    training = Training()
    training.step()
    training.step()
    if world.rank == 0:
        started = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            training.step()
        say(seconds=time.monotonic() - started, message=str(caught.value))
        assert training.session.steps == 2


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print("passed", name, flush=True)
