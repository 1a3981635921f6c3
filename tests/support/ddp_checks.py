"""What real workers check beside torch's DistributedDataParallel, and with its hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.real_worker import same_everywhere, world
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.algorithms.compressors import Dense, Feedback, TopK
from gossamer.comm.process_group import ProcessGroupTransport


class Tied(nn.Module):
    """Tied embeddings, a frozen layer, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.LayerNorm(24))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.frozen(self.embed(x))))
        return y


def train(model: nn.Module, forward: nn.Module, steps: int = 12, seed: int = 0) -> Tensor:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5, momentum=0.9)
    session = None if forward is not model else gossamer.attach(model, optimizer, recipe_of(model))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=steps)
    make = torch.Generator().manual_seed(100 * seed + world.rank)
    for _ in range(steps):
        tokens = torch.randint(0, 50, (8, 9), generator=make)
        optimizer.zero_grad()
        cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        scheduler.step()
    if session is not None:
        session.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


_recipes: dict[int, Any] = {}


def recipe_of(model: nn.Module) -> Any:
    return _recipes.get(id(model))


def built(recipe: Any = None) -> Tied:
    torch.manual_seed(3)
    model = Tied()
    _recipes[id(model)] = recipe
    return model


def dense_equals_ddp() -> None:
    """Tied and frozen weights, clipping, a scheduler, momentum: bit-equal with two workers, else within rounding."""
    for view in (True, False):
        first, second = built(), built()
        ddp = DistributedDataParallel(second, gradient_as_bucket_view=view)
        ours, theirs = train(first, first), train(second, ddp)
        if world.size == 2:
            assert torch.equal(ours, theirs), f"{int((ours != theirs).sum())} parameters differ from DDP's"
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    transport = ProcessGroupTransport()
    same_everywhere(ours, transport)
    transport.close()


def dense_equals_ddp_on_integers() -> None:
    """Gradients that are whole numbers: the same bits as DDP whatever the number of workers."""
    torch.manual_seed(0)
    first = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (1000, 7, 333)])
    second = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (1000, 7, 333)])

    class Weighted(nn.Module):
        def __init__(self, ps: nn.ParameterList) -> None:
            super().__init__()
            self.ps = ps

        def forward(self, xs: list[Tensor]) -> Tensor:
            return torch.stack([(p * x).sum() for p, x in zip(self.ps, xs, strict=True)]).sum()

    a, b = Weighted(first), Weighted(second)
    ddp = DistributedDataParallel(b, gradient_as_bucket_view=True)
    optimizers = [torch.optim.SGD(a.parameters(), 1.0), torch.optim.SGD(b.parameters(), 1.0)]
    session = gossamer.attach(a, optimizers[0])
    make = torch.Generator().manual_seed(world.rank)
    for _ in range(4):
        xs = [torch.randint(-500, 500, (n,), generator=make).float() * world.size for n in (1000, 7, 333)]
        for forward, optimizer in zip((a, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            forward(xs).backward()
            optimizer.step()
    session.close()
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)


def dense_is_within_rounding_of_ddp() -> None:
    """One step's averaged gradients, ours and DDP's, are within (n-1) 2^-24 sum |x| of the exact mean of the x's."""
    first, second = built(), built()
    optimizer = torch.optim.SGD((p for p in first.parameters() if p.requires_grad), lr=0.1)
    session = gossamer.attach(first, optimizer)
    ddp = DistributedDataParallel(second, gradient_as_bucket_view=True)
    tokens = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(world.rank))
    third = built()
    for model in (first, ddp, third):
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for p, q, own in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        if p.grad is None or q.grad is None or own.grad is None:
            assert not p.requires_grad
            continue
        exact, size = own.grad.double() / world.size, own.grad.double().abs() / world.size
        dist.all_reduce(exact)
        dist.all_reduce(size)
        for averaged in (p.grad, q.grad):
            assert ((averaged - exact).abs() <= (world.size - 1) * 2**-24 * size * (1 + 1e-6)).all()
    session.close()


def hook_survives_rebuilding() -> None:
    """DDP regroups its buckets after the first step; from step 0 the hook gives what attach gives."""
    # Of four workers each would own a part of a bucket, and which entries it keeps depends on what lies in the bucket.
    gathered = "Route(Feedback(TopK(0.05)))"
    recipes = ["TopK(0.05)", "PowerSGD(rank=2)", "Int8()", "Dense()"] if world.size == 2 else [gathered]
    for recipe in recipes:
        first, second = built(recipe), built()
        ours = train(first, first)
        ddp = DistributedDataParallel(second, gradient_as_bucket_view=True, bucket_cap_mb=0.005)
        state, hook = gossamer.ddp_hook(ddp, recipe)
        ddp.register_comm_hook(state, hook)
        theirs = train(second, ddp)
        if world.size == 2:
            assert torch.equal(ours, theirs), recipe
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def hook_skips_what_is_not_finite() -> None:
    """A bad gradient on one rank is NaN on all of them and leaves the residuals as they were."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    ddp = DistributedDataParallel(model)
    state, hook = gossamer.ddp_hook(ddp, "TopK(0.1)")
    ddp.register_comm_hook(state, hook)
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(world.rank))

    def remembered() -> Tensor:
        return torch.cat([packed.flat for each in state.memory._states.values() for packed in each.values()])

    mse_loss(ddp(inputs), torch.zeros(4, 30)).backward()
    before = remembered().clone()
    assert before.any()
    model.zero_grad()
    (ddp(inputs).sum() * (float("inf") if world.rank == 1 else 1.0)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isnan().all()
    assert torch.equal(before, remembered())
    model.zero_grad()
    mse_loss(ddp(inputs), torch.zeros(4, 30)).backward()
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()


def averages() -> None:
    """average_ on lists and dicts, with and without a state."""
    mine = [torch.full((3, 2), float(world.rank)), torch.full((5,), world.rank, dtype=torch.float64)]
    gossamer.average_(mine, Dense())
    middle = (world.size - 1) / 2
    assert all(torch.equal(tensor, torch.full_like(tensor, middle)) for tensor in mine)
    state: dict[str, Any] = {}
    sent = torch.zeros(200)
    given = torch.zeros(200)
    for step in range(30):
        make = torch.Generator().manual_seed(step)
        everyone = [torch.randn(200, generator=make) for _ in range(world.size)]
        x = {"x": everyone[world.rank].clone()}
        given += torch.stack(everyone).mean(0)
        gossamer.average_(x, Feedback(TopK(density=0.1)), state)
        sent += x["x"]
    (memory,) = state.values()
    (remembered,) = memory._states.values()
    gossamer.average_(residual := {"r": remembered["residual"]["x"].clone()}, Dense())
    torch.testing.assert_close(sent + residual["r"], given, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"state = \{\}"):
        gossamer.average_([torch.zeros(3)], Feedback(TopK(density=0.5)))


class Reducing(torch.autograd.Function):
    """What SyncBatchNorm does: collectives of the user's, on the default group, within forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        return x - mean / world.size

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        mean = grads[0].mean(0)
        dist.all_reduce(mean)
        return grads[0] - mean / world.size


def other_collectives_beside_the_lane() -> None:
    """The communication thread has a group of its own, so collectives in the model cannot come between its ops."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)
    session = gossamer.attach(layers, optimizer, "TopK(0.1)")
    make = torch.Generator().manual_seed(world.rank)
    for _ in range(10):
        x = torch.randn(16, 32, generator=make)
        for layer in layers:
            x = Reducing.apply(torch.tanh(layer(x)))
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()
    transport = ProcessGroupTransport()
    same_everywhere(torch.cat([p.detach().flatten() for p in layers.parameters()]), transport)
    transport.close()
    session.close()
