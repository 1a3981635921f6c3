"""Fabric strategy: attaches the models and optimizers of fabric.setup."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.integrations.lightning import collectives, session_files
from gossamer.integrations.lightning.joined_strategy import JoinedStrategy
from gossamer.integrations.lightning.session_files import agreed_state, close_agreed
from gossamer.train.session.session import Session


class GossamerFabricStrategy(JoinedStrategy, DDPStrategy):  # type: ignore[misc]  # Any, where Lightning is not installed
    """Trains the models of fabric.setup together with the other workers, by a recipe.

    Models are not wrapped. `sessions` has the sessions of gossamer.attach, in the order of setup. Call `close()` after
    training.

    Args:
        args, kwargs: as for GossamerStrategy.

    Example:
        fabric = lightning.Fabric(strategy=GossamerFabricStrategy("TopK(density=0.01)"))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sessions: list[Session] = []
        self._modules: list[ref[nn.Module]] = []  # in the order of setup
        self._waiting: list[Optimizer] = []  # optimizers that were set up before their module
        self._further: list[tuple[nn.Module, Optimizer]] = []  # optimizers after the first of their module
        self._backward_sync_control = MutedSessions(self.sessions)

    # -- joining and attaching ----------------------------------------------------------------------------------------

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._join()

    def setup_module(self, module: nn.Module) -> nn.Module:
        self._modules.append(ref(module))
        waiting, self._waiting = self._waiting, []
        for optimizer in waiting:
            self.setup_optimizer(optimizer)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Attach an optimizer to the module of its parameters, at the latest once that is set up. A second one of the
        same module is tracked."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules = [module for each in self._modules if (module := each()) is not None]
        own = [each for each in modules if held & {id(parameter) for parameter in each.parameters()}]
        attached = [session for session in self.sessions if own and session.model is own[-1]]
        if attached:
            self._further.append((own[-1], optimizer))
            attached[0].track(**{f"optimizer_{len(self._further)}": optimizer})
        elif own:
            scaler = getattr(self.precision, "scaler", None)
            self.sessions.append(self._attach(own[-1], optimizer, scaler=scaler))
        else:
            self._waiting.append(optimizer)
        return optimizer

    def close(self) -> None:
        """Close all sessions and leave the merged parameters in their models. All ranks call it."""
        for session in self.sessions:
            close_agreed(session)
        self.sessions.clear()
        self._further.clear()
        self._waiting.clear()

    def teardown(self) -> None:
        self.close()
        super().teardown()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return collectives.all_reduce(tensor, reduce_op) if isinstance(tensor, Tensor) else tensor

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state, with merged parameters under local training. All ranks call it."""
        own = [session for session in self.sessions if session.model is module]
        state_dict = partial(super().get_module_state_dict, module)
        return agreed_state(own[0], state_dict) if own else dict(state_dict())

    def save_checkpoint(self, path: str | os.PathLike[str], state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Rank 0 writes Fabric's file; next to it every rank saves its sessions of the saved optimizers."""
        super().save_checkpoint(path, state, *args, **kwargs)
        for number, session in enumerate(self.sessions):
            if any(part is session.optimizer for part in state.values()):
                schedulers = [each for each in state.values() if getattr(each, "optimizer", None) is session.optimizer]
                session_files.save(session, path, number, schedulers=[each.state_dict() for each in schedulers])

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, *args: Any, **kwargs: Any
    ) -> Mapping[str, Any]:
        """Load Fabric's file, attach again the models and optimizers that it changes, and load their sessions."""
        parts = list(state.values()) if isinstance(state, dict) else [state]
        changed = {
            number: session
            for number, session in enumerate(self.sessions)
            if any(part is session.model or part is session.optimizer for part in parts)
        }
        for session in changed.values():
            session.close()
        try:
            found: Mapping[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        finally:  # also without the file, since a script may then train from the beginning
            for number, before in changed.items():
                self.sessions[number] = self._attached_again(before)
        for number in changed:
            session = self.sessions[number]
            if any(part is session.optimizer for part in parts):
                session_files.load(session, path, number)
        return found

    def _attached_again(self, before: Session) -> Session:
        session = self._attach(before.model, before.optimizer, scaler=before.scaler)
        for number, (module, optimizer) in enumerate(self._further, start=1):
            if module is session.model:
                session.track(**{f"optimizer_{number}": optimizer})
        return session


class MutedSessions(_BackwardSyncControl):  # type: ignore[misc]  # Any, where Lightning is not installed
    """Lets gradients add up on this worker within fabric.no_backward_sync."""

    def __init__(self, sessions: list[Session]) -> None:
        self._sessions = sessions

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        own = [session for session in self._sessions if session.model is module]
        return own[0].no_sync() if enabled and own else nullcontext()
