"""Stages between boundaries: gradients, differences, schedules, evaluation and checkpoints, in one process."""

import copy
import io

import pytest
import torch
from support.two_stages import GPIPE, ONE_F_ONE_B, TwoStages, halves
from torch import Tensor, nn

from gossamer.errors import LayoutError, LoopError, MalformedError
from gossamer.train.parallel import Boundary, CompressedStage, boundary

SAMPLES = 64


def edge_of(
    codec: str = "Float4()", microbatch: int = 16, dtype: torch.dtype = torch.float32, differing: bool = False
) -> Boundary:
    options = {"feedback": "difference", "samples": SAMPLES} if differing else {}
    return boundary(codec, shape=(microbatch, 32), dtype=dtype, **options)  # type: ignore[arg-type]


def data(count: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x, torch.sin(2 * x[:, :2]) + x[:, 2:4] * x[:, 4:6]


def gradients(stages: TwoStages) -> list[Tensor]:
    return [parameter.grad for parameter in stages.parameters if parameter.grad is not None]


@pytest.mark.parametrize("schedule", [["F0", "B0"], GPIPE, ONE_F_ONE_B])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_codec_changes_no_bit(schedule: list[str], dtype: torch.dtype) -> None:
    plain, exact = (
        TwoStages(*(half.to(dtype) for half in halves()), edge)
        for edge in (None, edge_of("Dense()", 32 // len(schedule), dtype))
    )
    x, y = (each.to(dtype) for each in data())
    assert plain.step(x, y, schedule=schedule) == exact.step(x, y, schedule=schedule)
    assert len(gradients(plain)) == 6
    assert all(map(torch.equal, gradients(plain), gradients(exact)))


@pytest.mark.parametrize("codec", ["Int8()", "Float4()", "TopK(0.1)"])
def test_gradients_are_those_of_what_was_received(codec: str) -> None:
    """The second half trains on decoded activations; the first on the decoded gradient, as if nothing was rounded."""
    edge = edge_of(codec)
    stages = TwoStages(*halves(), edge)
    x, y = data()
    stages.step(x, y)
    first, second = copy.deepcopy(stages.first.module), copy.deepcopy(stages.second.module)
    first.zero_grad()
    second.zero_grad()
    forward, backward = stages.crossed
    assert forward.shape == backward.shape == edge.carrier().shape
    received = edge.format.unpack(edge.activation, forward)[1]
    assert received is not None
    leaf = received.view(16, 32).requires_grad_()
    nn.functional.mse_loss(second(leaf), y).backward()
    told = edge.format.unpack(edge.gradient, backward)[1]
    assert told is not None
    first(x).backward(told.view(16, 32))
    by_hand = [parameter.grad for parameter in (*first.parameters(), *second.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(gradients(stages), by_hand, strict=True) if b is not None)
    assert leaf.grad is not None
    assert not torch.equal(told.view(16, 32), leaf.grad)  # it was compressed, too


@pytest.mark.parametrize("codec", ["OneBit()", "Float4()", "TopK(0.1)", "Int8(stochastic=True)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_known_of_samples_that_come_again_comes_closer(codec: str, dtype: torch.dtype) -> None:
    stages = TwoStages(*(half.to(dtype) for half in halves()), edge_of(codec, dtype=dtype, differing=True))
    x, y = (each.to(dtype) for each in data())
    ids = torch.arange(20, 36)
    errors = []
    for _ in range(6):
        stages.step(x, y, ids)
        sent, heard = stages.first.after, stages.second.before
        assert sent is not None
        assert sent.memory is not None
        assert heard is not None
        assert heard.memory is not None
        assert torch.equal(sent.memory.known, heard.memory.known)
        errors.append(float((heard.memory.known[ids] - stages.first.module(x)).detach().float().norm()))
    assert errors[5] < errors[1] < errors[0]
    assert errors[5] < 0.6 * errors[0]
    assert not heard.memory.known[:20].any()  # of samples that have not come
    assert not heard.memory.known[36:].any()


@pytest.mark.parametrize("differing", [False, True])
def test_schedules_with_microbatches_in_flight_agree(differing: bool) -> None:
    x, y = data()
    ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2))[:16] if differing else None
    found = []
    for schedule in (GPIPE, ONE_F_ONE_B):
        stages = TwoStages(*halves(), edge_of(microbatch=4, differing=differing))
        for _ in range(3):
            loss = stages.step(x, y, ids, schedule)
        found.append([torch.tensor(loss), *gradients(stages)])
    assert all(map(torch.equal, *found))


def test_a_sample_in_two_microbatches_in_flight_is_known_alike_on_both_sides() -> None:
    stages = TwoStages(*halves(), edge_of(microbatch=4, differing=True))
    x, y = data()
    stages.step(x, y, torch.tensor([0, 1, 2, 3] * 4), ONE_F_ONE_B)
    stages.step(x, y, torch.tensor([0, 1, 2, 3] * 4), GPIPE)
    memories = [each.memory for each in (stages.first.after, stages.second.before) if each is not None]
    assert all(map(torch.equal, *(memory.state_dict().values() for memory in memories if memory is not None)))


def test_evaluation_remembers_nothing() -> None:
    stages = TwoStages(*halves(), edge_of(differing=True))
    x, y = data()
    ids = torch.arange(16)
    stages.step(x, y, ids)
    assert stages.first.after is not None
    memory = stages.first.after.memory
    assert memory is not None
    before = memory.known.clone()
    with torch.no_grad():
        _, carrier, known = stages.forward(x, ids)
        _, _, unknown = stages.forward(x)  # held-out samples have no ids
    assert not carrier.requires_grad
    assert torch.equal(memory.known, before)
    exact = stages.second.module(stages.first.module(x))
    assert (known - exact).norm() < (unknown - exact).norm()  # differences are read, too, where samples are known
    stages.step(x, y, ids)  # both sides are still of one mind


def test_training_with_differences_asks_for_samples() -> None:
    stages = TwoStages(*halves(), edge_of(differing=True))
    with pytest.raises(LoopError, match=r"schedule\.step\(\.\.\., samples=ids\)"):
        stages.step(*data())


def test_sides_that_know_different_things_are_reported() -> None:
    stages = TwoStages(*halves(), edge_of(differing=True))
    x, y = data()
    stages.step(x, y, torch.arange(16))
    sent = stages.first(x, samples=torch.arange(16))  # the other side never hears this one
    with pytest.raises(LoopError, match="has received other messages"):
        stages.second(stages.first(x, samples=torch.arange(16)), samples=torch.arange(16))
    with pytest.raises(LoopError, match="sample ids differ"):
        stages.second(sent, samples=torch.arange(1, 17))
    with pytest.raises(LoopError, match="does not have"):
        stages.second(sent)


def test_numbers_that_overflow_arrive_as_nan_and_are_not_remembered() -> None:
    """As without a boundary: whoever scales gradients sees the overflow on every stage, and skips the step."""
    stages = TwoStages(*halves(), edge_of(differing=True))
    x, y = data()
    ids = torch.arange(16)
    stages.step(torch.full_like(x, torch.nan), y, ids)
    assert all(gradient.isnan().any() for gradient in gradients(stages))
    for parameter in stages.parameters:
        parameter.grad = None
    stages.step(x, y, ids)
    assert all(gradient.isfinite().all() for gradient in gradients(stages))


def test_a_stage_without_a_gradient_to_send_back_sends_zeros() -> None:
    stages = TwoStages(*halves(), edge_of())
    sent = stages.first(data()[0])
    sent.backward(torch.zeros_like(sent))  # what torch sends where a microbatch has no gradient
    assert all(not parameter.grad.any() for parameter in stages.first.parameters() if parameter.grad is not None)


def test_frozen_stages_send_no_gradient() -> None:
    first, second = halves()
    stages = TwoStages(first.requires_grad_(False), second, edge_of(differing=True))
    sent, _, output = stages.forward(data()[0], torch.arange(16))
    assert not sent.requires_grad
    output.sum().backward()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_checkpoints_hold_what_is_known() -> None:
    x, y = data()
    ids = torch.arange(16)
    straight, stopped, resumed = (TwoStages(*halves(), edge_of(differing=True)) for _ in range(3))
    for stages in (straight, stopped):
        stages.step(x, y, ids)
    for stages in (straight, stopped, resumed):
        stages.crossed.clear()
    for saved, loaded in ((stopped.first, resumed.first), (stopped.second, resumed.second)):
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=True))
    assert straight.step(x, y, ids) == resumed.step(x, y, ids)
    assert all(map(_same_bits, straight.crossed, resumed.crossed))
    fresh = TwoStages(*halves(), edge_of(differing=True))
    fresh.step(x, y, ids)
    assert not _same_bits(fresh.crossed[0], resumed.crossed[0])


@pytest.mark.parametrize("output", [torch.zeros(8, 32), torch.zeros(16, 32, dtype=torch.float64)])
def test_activations_of_another_size_are_refused(output: Tensor) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return output

    with pytest.raises(LayoutError, match=r"shape=\(.*drop_last=True"):
        CompressedStage(Returns(), before=None, after=edge_of())(torch.zeros(1))


def test_one_tensor_crosses() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(LayoutError, match="returned a tuple"):
        CompressedStage(Two(), before=None, after=edge_of())(torch.zeros(16, 32))
    with pytest.raises(MalformedError, match="sent 2 tensors"):
        CompressedStage(Two(), before=edge_of(), after=None)(torch.zeros(3), torch.zeros(3))


def _trained(edge: Boundary | None) -> float:
    """The training loss of a small regression at the end."""
    x, y = data(SAMPLES, seed=5)
    stages = TwoStages(*halves(), edge)
    optimizer = torch.optim.Adam(stages.parameters, 0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        losses = []
        for ids in torch.randperm(SAMPLES, generator=generator).split(16):
            losses.append(stages.step(x[ids], y[ids], ids))
            optimizer.step()
            optimizer.zero_grad()
    return sum(losses) / len(losses)


def test_a_coarse_codec_learns_with_differences_and_hardly_without() -> None:
    exact, with_differences, without = map(
        _trained, (None, edge_of("TopK(0.05)", differing=True), edge_of("TopK(0.05)"))
    )
    assert exact < with_differences < 0.2 * without
