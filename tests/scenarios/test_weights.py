"""Sample weights: what is remembered keeps the weight that it had."""

from __future__ import annotations

import pytest
import torch
from support.virtual_workers import Worker, cluster, network
from torch import Tensor
from torch.nn.functional import mse_loss

from gossamer.train.engine.bucket_reduction import StepReduction

LOSSLESS = [
    "Route(DGC(density=1.0, masking=False), smallest=0)",
    "Route(Feedback(TopK(density=1.0)), smallest=0)",
]
WEIGHTS = [(4.0, 4.0), (4.0, 1.0), (4.0, 0.0), (1.0, 8.0), (4.0, 4.0), (4.0, 4.0)]


def trained(recipe: str) -> Tensor:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session = worker.attach(model, optimizer, recipe)
        generator = torch.Generator().manual_seed(worker.rank)
        width = next(module.in_features for module in model.modules() if isinstance(module, torch.nn.Linear))
        for weights in WEIGHTS:
            inputs = torch.randn(6, width, dtype=torch.float64, generator=generator)
            session.set_batch_weight(weights[worker.rank])
            optimizer.zero_grad()
            mse_loss(model(inputs), torch.ones_like(model(inputs))).backward()
            optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    first, second = cluster(work, 2)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("recipe", LOSSLESS)
def test_what_loses_nothing_equals_dense_with_unequal_weights(recipe: str) -> None:
    torch.testing.assert_close(trained(recipe), trained("Dense()"), atol=1e-12, rtol=1e-12)


def test_dividing_afterwards_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepReduction, "weigh", lambda self, trained, check: None)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(trained(LOSSLESS[0]), trained("Dense()"), atol=1e-3, rtol=1e-3)
