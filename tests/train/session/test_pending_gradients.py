import pytest
import torch
from torch import nn

from gossamer.train.engine.extension import GradientUse
from gossamer.train.session.pending_gradients import KEY, PendingGradients


@pytest.fixture
def model():
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones(1, 2)
    return model


def owing(*names):
    pending = PendingGradients()
    shapes = {"weight": (1, 2), "bias": (1,)}
    pending.put({name: torch.full(shapes[name], 3.0) for name in names})
    return pending


def pay(pending, model, optimizer=None, closure=False):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    pending.before_step(GradientUse(optimizer, dict(model.named_parameters()), closure))
    return model.weight.grad.tolist()


def test_pending_gradients_are_added_once(model):
    pending = owing("weight")
    assert pay(pending, model) == pay(pending, model) == [[4.0, 4.0]]
    assert pending.state() == {}


def test_a_parameter_without_a_gradient_waits(model):
    pending = owing("weight", "bias")
    pay(pending, model)
    assert list(pending.state()) == ["bias"]
    model.bias.grad = torch.zeros(1)
    pay(pending, model)
    assert model.bias.grad.item() == 3.0


def test_so_does_one_of_another_optimizer(model):
    assert pay(owing("weight"), model, torch.optim.SGD([model.bias], lr=1.0)) == [[1.0, 1.0]]


def test_a_step_that_is_left_out_or_has_a_closure_pays_nothing(model):
    fused = torch.optim.SGD(model.parameters(), lr=1.0)
    fused.found_inf, fused.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
    pending = owing("weight")
    assert pay(pending, model, fused) == pay(pending, model, closure=True) == [[1.0, 1.0]]
    fused.found_inf = torch.tensor(0.0)
    assert pay(pending, model, fused) == [[25.0, 25.0]]  # the step divides by the scale


def test_pending_gradients_of_other_workers_are_averaged():
    pending = PendingGradients()
    pending.resume([{"bias": {KEY: torch.tensor([2.0]), "residual": torch.ones(1)}}, {}])
    assert pending.take() == {"bias": torch.tensor([1.0])}
    assert pending.take() == {}
