"""Learning rate factor: lets a script's optimizers step with a multiple of the rates that its schedulers set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class LearningRateFactor:
    """Multiplies the rate of every parameter group for the duration of optimizer.step(), on workers that `here` says.

    Around the hooks of sessions, which see the multiple, too. Between steps the groups hold what the script's
    schedulers gave them, so that rates which they compute from the last one are not multiplied again.
    """

    def __init__(self, factor: float, here: Callable[[], bool]) -> None:
        self._factor, self._here = factor, here
        self._before: dict[int, list[tuple[dict[str, Any], Any]]] = {}  # by optimizer: groups, and their own rates
        self._hooks = (
            register_optimizer_step_pre_hook(self._multiply),
            register_optimizer_step_post_hook(self._put_back),
        )

    def _multiply(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if not self._here():
            return
        multiplied = {id(group) for groups in self._before.values() for group, _ in groups}  # by one that wraps it
        mine = [
            (group, group["lr"]) for group in optimizer.param_groups if "lr" in group and id(group) not in multiplied
        ]
        self._before[id(optimizer)] = mine
        for group, rate in mine:
            group["lr"] = rate * self._factor

    def _put_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        for group, rate in self._before.pop(id(optimizer), ()):
            group["lr"] = rate

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
