"""Optimizers that keep weights besides the parameters: masters in wider precision, slow weights, another iterate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer


class MasterSGD(Optimizer):
    """SGD in float32 on copies in its state, of which the parameters are rounded."""

    def __init__(self, parameters: Iterable[Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().to(torch.float32, copy=True)
                    state["momentum_buffer"] = torch.zeros_like(p)
                if p.grad is not None:
                    state["momentum_buffer"].add_(p.grad)
                    state["master"] = state["master"] - group["lr"] * p.grad.float()  # another tensor in each step
                p.copy_(state["master"])


class ListedMasterSGD(Optimizer):
    """The same with masters in a list of its own, which are there before the first step."""

    def __init__(self, parameters: Iterable[Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.masters = [
            [p.detach().to(torch.float32, copy=True) for p in group["params"]] for group in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, masters in zip(self.param_groups, self.masters, strict=True):
            for p, master in zip(group["params"], masters, strict=True):
                self.state[p]["step"] = 1
                if p.grad is not None:
                    master.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(master)


class Within(Optimizer):
    """Makes its steps by another optimizer, as Accelerate's and Muon's companions do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Lookahead(Optimizer):
    """SGD whose slow weights take over every second step (Zhang et al. 2019)."""

    def __init__(self, parameters: Iterable[Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.made += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("slow", p.detach().clone())
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                if self.made % 2 == 0:
                    p.copy_(state["slow"].lerp_(p, 0.5))


class ScheduleFreeSGD(Optimizer):
    """Gradients at y = 0.1 z + 0.9 x; eval() lends the average x as parameters (Defazio et al. 2024)."""

    def __init__(self, parameters: Iterable[Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                if p.grad is not None:
                    p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                    z.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["z"], 1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["z"], 0.1)
