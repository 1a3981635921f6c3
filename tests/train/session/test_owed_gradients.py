import pytest
import torch
from torch import nn

from gossamer.train.engine.extension import GradientUse
from gossamer.train.session.owed_gradients import KEY, OwedGradients


@pytest.fixture
def model():
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones(1, 2)
    return model


def owing(*names):
    owed = OwedGradients()
    shapes = {"weight": (1, 2), "bias": (1,)}
    owed.put({name: torch.full(shapes[name], 3.0) for name in names})
    return owed


def pay(owed, model, optimizer=None, closure=False):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    owed.before_step(GradientUse(optimizer, dict(model.named_parameters()), closure))
    return model.weight.grad.tolist()


def test_what_is_owed_is_paid_once(model):
    owed = owing("weight")
    assert pay(owed, model) == pay(owed, model) == [[4.0, 4.0]]
    assert owed.state() == {}


def test_a_parameter_without_a_gradient_waits(model):
    owed = owing("weight", "bias")
    pay(owed, model)
    assert list(owed.state()) == ["bias"]
    model.bias.grad = torch.zeros(1)
    pay(owed, model)
    assert model.bias.grad.item() == 3.0


def test_so_does_one_of_another_optimizer(model):
    assert pay(owing("weight"), model, torch.optim.SGD([model.bias], lr=1.0)) == [[1.0, 1.0]]


def test_a_step_that_is_left_out_or_has_a_closure_pays_nothing(model):
    fused = torch.optim.SGD(model.parameters(), lr=1.0)
    fused.found_inf, fused.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
    owed = owing("weight")
    assert pay(owed, model, fused) == pay(owed, model, closure=True) == [[1.0, 1.0]]
    fused.found_inf = torch.tensor(0.0)
    assert pay(owed, model, fused) == [[25.0, 25.0]]  # the step divides by the scale


def test_another_number_of_workers_owes_the_mean():
    owed = OwedGradients()
    owed.resume([{"bias": {KEY: torch.tensor([2.0]), "residual": torch.ones(1)}}, {}])
    assert owed.take() == {"bias": torch.tensor([1.0])}
    assert owed.take() == {}
