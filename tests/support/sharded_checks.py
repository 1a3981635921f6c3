"""What four real workers check about models that lie in parts on several; run with the checks' names as arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.sharded_training import (
    Stages,
    attached,
    batch,
    by_fsdp,
    by_tensor_parallelism,
    distance,
    exact_model,
    loss_of,
    one_process,
    sgd,
    train,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import gossamer
from gossamer.algorithms.compressors.sharded import is_unsent
from gossamer.errors import AttachError, CheckpointError
from gossamer.train.checkpoint import dcp, digest
from gossamer.train.sharding.local_shards import local_parts

torch.set_num_threads(1)
world = gossamer.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
replicas, shards = mesh["replicate"], mesh["shard"]
replica = replicas.get_local_rank()
TOPK, POWERSGD = "Route(TopK(density=0.3), smallest=0)", "Route(PowerSGD(rank=1), smallest=0)"
folder = Path(os.environ["CHECKS_FOLDER"])


def bits(model: nn.Module) -> str:
    return digest(local_parts(model.parameters()))


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value)
    return found


# -- equality with what is known ---------------------------------------------------------------------------------------


def equals_plain_training() -> None:
    """FSDP2 in both ways, compiled, tensor parallelism and stages come to the bits of one process."""
    wanted = one_process(range(4), momentum=0.5)
    for options in ({"reshard_after_forward": True}, {"reshard_after_forward": False}):
        model = by_fsdp(shards, **options)
        session, optimizer = attached(model, "Dense()", replicas, momentum=0.5)
        with session:
            train(model, optimizer, [world.rank], 3)
            assert session.steps == 3
        assert distance(whole(model), wanted) == 0
    model = by_tensor_parallelism(shards)
    session, optimizer = attached(model, "Dense()", replicas)
    with session:
        train(model, optimizer, [replica], 3)
    assert distance(whole(model), one_process(range(2))) == 0
    stages = Stages(shards)
    session, optimizer = attached(stages.module, "Dense()", replicas)
    with session:
        stages.train(optimizer, replica, 3)
        assert session.steps == 3
    assert distance(whole(stages.module), stages.wanted(one_process(range(2)))) == 0
    assert distance(whole(model), one_process(range(4))) > 0  # other data make other parameters


def follows_a_schedule() -> None:
    """torch's 1F1B makes a pass for each part of a batch; gradients leave once, before the optimizer's step."""
    layers = exact_model()
    first = shards.get_local_rank() == 0
    module = nn.Sequential(layers[0], layers[1]) if first else nn.Sequential(layers[2])
    stage = PipelineStage(module, shards.get_local_rank(), 2, world.device, group=shards.get_group())
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, _: loss_of(output), scale_grads=False)
    session, optimizer = attached(module, "Dense()", replicas)
    with session:
        for step in range(3):
            optimizer.zero_grad()
            if first:
                schedule.step(batch(replica, step))
            else:
                schedule.step(target=torch.zeros(2, 3))
            optimizer.step()
        assert session.steps == 3
    wanted = {name: each for name, each in one_process(range(2)).items() if name.startswith("0." if first else "2.")}
    assert distance(dict(module.named_parameters()), {"0" + name[1:]: each for name, each in wanted.items()}) == 0


def equals_torch_hsdp() -> None:
    """torch's own HSDP sums the same gradients in the same precision, also where passes are in bfloat16."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        theirs = by_fsdp(mesh, mp_policy=policy)
        train(theirs, sgd(theirs), [world.rank], 3)
        ours = by_fsdp(shards, mp_policy=policy)
        session, optimizer = attached(ours, "Dense()", replicas)
        with session:
            train(ours, optimizer, [world.rank], 3)
        assert distance(whole(ours), whole(theirs)) == 0


def accumulates_before_it_shards() -> None:
    """FSDP2's own way to accumulate: passes that leave no sharded gradient send nothing."""
    model = by_fsdp(shards)
    session, optimizer = attached(model, "Dense()", replicas)
    with session:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            (loss_of(model(batch(world.rank, int(last)))) / 2).backward()
        optimizer.step()
        assert session.steps == 1
    other = exact_model()
    optimizer = sgd(other)
    for step in range(2):
        for worker in range(4):
            (loss_of(other(batch(worker, step))) / 8).backward()
    optimizer.step()
    assert distance(whole(model), dict(other.named_parameters())) == 0


def serves_empty_shards() -> None:
    """A parameter of one row over two ranks: one of them has nothing of it, and takes part."""
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    fully_shard(model, mesh=shards)
    held = model.weight.to_local().numel()
    assert sorted(gathered(held)) == [0, 0, 4, 4]
    for recipe in (
        "Dense()",
        TOPK,
        POWERSGD,
        "DiLoCo(period=1)+Int8()",
    ):
        session, optimizer = attached(model, recipe, replicas)
        with session:
            for step in range(2):
                optimizer.zero_grad()
                model(batch(world.rank, step)).sum().backward()
                optimizer.step()
        found = gathered(digest([whole(model)["weight"]]))
        assert found == found[:1] * 4, recipe


# -- compressors and strategies ----------------------------------------------------------------------------------------


def remembers_what_it_did_not_send() -> None:
    """Shard by shard: what was applied, and the mean of what replicas have still to send, is the gradients' sum."""
    total = torch.stack([batch(worker, step).sum(0) for step in range(3) for worker in range(4)]).sum(0) / 4
    wanted = torch.tensor([1.0, 2.0, -1.0, 1.0])[:, None] * total
    for recipe, exact in (
        (TOPK, True),
        (POWERSGD, False),
    ):
        model = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        fully_shard(model, mesh=shards)
        session, optimizer = attached(model, recipe, replicas)
        with session:
            for step in range(3):
                optimizer.zero_grad()
                (model(batch(world.rank, step)) * torch.tensor([1.0, 2.0, -1.0, 1.0])).sum().backward()
                optimizer.step()
            state = session.state_dict()["state"]["weight"]
        residual = next(tensor for key, tensor in state.items() if is_unsent(key))
        assert residual.shape == (2, 4)  # the matrix that the local shard is
        assert any(bool(theirs.any()) for theirs in gathered(residual))
        mine = wanted.tensor_split(2)[shards.get_local_rank()]
        held = [theirs for rank, theirs in enumerate(gathered(residual)) if rank % 2 == world.rank % 2]
        applied = -model.weight.to_local().detach() * 2**6
        away = (applied + sum(held) / 2 - mine).abs().max()
        assert float(away) <= (0 if exact else 1e-4), (recipe, away)


def averages_parameters() -> None:
    """DiLoCo of shards is DiLoCo of the replicas; `averaged_parameters` shows what they agree on, and training goes on
    from each rank's own parameters.

    A pass within the block makes FSDP2 gather what it is to forget again.
    """
    model = by_fsdp(shards)
    recipe = "DiLoCo(period=2, outer_learning_rate=0.5, outer_momentum=0.0)"
    session, optimizer = attached(model, recipe, replicas)
    agreed = {name: each.detach().clone() for name, each in exact_model().named_parameters()}
    ends = [one_process((first, first + 1), 2) for first in (0, 2)]
    wanted = {name: each + 0.5 * ((ends[0][name] + ends[1][name]) / 2 - each) for name, each in agreed.items()}
    with session:
        train(model, optimizer, [world.rank], 2)
        assert distance(whole(model), wanted) == 0
        optimizer.zero_grad()
        loss_of(model(batch(world.rank, 2))).backward()
        optimizer.step()
        own, inputs = bits(model), batch(0, 9)
        with torch.no_grad():
            alone = model(inputs)
            with session.averaged_parameters(model):
                merged = model(inputs)
            assert torch.equal(model(inputs), alone)
            exact = exact_model()
            exact.load_state_dict(wanted)
            assert torch.equal(merged, exact(inputs))
            assert not torch.equal(merged, alone)
        for module in (model[0], model[2], model):
            module.reshard()
        assert bits(model) == own


# -- all parts of a replica together -----------------------------------------------------------------------------------


def clips_by_the_whole_norm() -> None:
    """Also where a tensor lies on all ranks of a replica, and where stages hold different layers."""
    limit = 0.5
    wanted = []
    for workers in (range(4), range(2)):
        model = exact_model()
        for worker in workers:
            (loss_of(model(batch(worker, 0))) / len(workers)).backward()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), limit)) > 2 * limit
        sgd(model).step()
        wanted.append({name: each.detach() for name, each in model.named_parameters()})
    model = by_fsdp(shards)
    session, optimizer = attached(model, "Dense()", replicas, clip_norm=limit)
    with session:
        train(model, optimizer, [world.rank], 1)
    assert distance(whole(model), wanted[0]) < 1e-6
    split = by_tensor_parallelism(shards)
    session, optimizer = attached(split, "Dense()", replicas, clip_norm=limit)
    with session:
        train(split, optimizer, [replica], 1)
    assert distance(whole(split), wanted[1]) < 1e-6
    stages = Stages(shards)
    session, optimizer = attached(stages.module, "Dense()", replicas, clip_norm=limit)
    with session:
        stages.train(optimizer, replica, 1)
    assert distance(whole(stages.module), stages.wanted(wanted[1])) < 1e-6


def skips_the_same_steps() -> None:
    """One shard's gradient is not finite: no shard of the replica makes the step; in lock step no replica does."""
    for recipe in ("Dense()", TOPK, "DiLoCo(period=8)"):
        model = by_tensor_parallelism(shards)
        spoil = model[0].weight.register_hook(lambda gradient: gradient * (float("inf") if world.rank == 1 else 1.0))
        session, optimizer = attached(model, recipe, replicas)
        before = bits(model)
        with session:
            train(model, optimizer, [replica], 1)
            local = recipe.startswith("DiLoCo")
            assert (bits(model) == before) is (replica == 0 or not local), recipe
            assert all(bool(part.isfinite().all()) for part in local_parts(model.parameters()))
            spoil.remove()
            train(model, optimizer, [replica], 1)
            assert bits(model) != before


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resumes() -> None:
    """Each rank's shards, what the optimizer keeps about them and what was not sent: to the bit."""
    path = folder / "run"

    def begun() -> Any:
        model = by_fsdp(shards)
        return model, *attached(model, TOPK, replicas, momentum=0.5)

    model, session, optimizer = begun()
    with session:
        train(model, optimizer, [world.rank], 2)
        session.save(path)
        train(model, optimizer, [world.rank], 2)
        wanted = bits(model)
    model, session, optimizer = begun()
    with session:
        session.load(path)
        assert session.steps == 2
        train(model, optimizer, [world.rank], 2)
        assert bits(model) == wanted
    other = by_fsdp(replicas)
    session, _ = attached(other, TOPK, shards)
    with session, pytest.raises(CheckpointError, match=r"in parts of the ranks \[\[0, 2\], \[1, 3\]\]"):
        session.load(path)
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint\.save"):
        dcp.export(path, folder / f"exported{world.rank}")


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuses() -> None:
    model = by_fsdp(shards)
    _refused(model, r'"0.weight" is a DTensor.*mesh=mesh\["replicate"\]')
    _refused(model, "2 dimensions", mesh=mesh)
    _refused(model, "is not a DeviceMesh", mesh="replicate")
    _refused(model, "is a DTensor over ranks", mesh=shards)
    _refused(by_fsdp(mesh), r"averaged twice.*fully_shard\(model, mesh=mesh", mesh=replicas)
    _refused(model, "GradScaler skips", mesh=replicas, scaler=torch.amp.GradScaler("cpu"))
    _refused(model, "contact single peers", "ParameterServer()", mesh=replicas)
    _refused(model, "contact single peers", "Gossip('pairwise')", mesh=replicas)
    _refused(model, "momentum of", "Route(DGC(density=0.1), smallest=0)", mesh=replicas)
    _refused(model, "averages or resets", "DiLoCo(period=2, optimizer_state='reset')", mesh=replicas)
    _refused(model, "Name a recipe", "auto", mesh=replicas)
    half = exact_model()
    fully_shard(half[0], mesh=shards)
    _refused(half, r'"2\.(weight|bias)" is in no module passed to fully_shard', mesh=replicas)
    wrapped = FullyShardedDataParallel(exact_model(), device_id=torch.device("cpu"))
    _refused(wrapped, "FSDP1.*fully_shard", mesh=replicas)
    session, _ = attached(model, "Dense()", replicas)
    with session, pytest.raises(AttachError, match=r"session.switch\(\) is not supported"):
        session.switch("Int8()")


def _refused(model: nn.Module, match: str, recipe: Any = None, **options: Any) -> None:
    with pytest.raises(AttachError, match=f"(?s){match}"):
        gossamer.attach(model, sgd(model), recipe, **options)


def deals_data_by_replica() -> None:
    """The ranks of a replica draw the same samples, those of two different ones; checkpoints hold the positions."""
    shard = world.within(replicas).shard(range(8), shuffle=False)
    drawn = gathered(list(shard))
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert sorted(drawn[0] + drawn[2]) == list(range(8))
    assert len(world.state_dict()["shards"]) == 1


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print("passed", name, flush=True)
    dist.destroy_process_group()
