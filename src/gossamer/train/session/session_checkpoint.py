"""Session checkpoint: writes and restores one rank's part of a checkpoint, and its state across a reset."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.compressors.sharded import is_owed
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.transport import Transport
from gossamer.errors import CheckpointError, GossamerError
from gossamer.train.checkpoint import reshard
from gossamer.train.checkpoint.coordinated import LoadedCheckpoint
from gossamer.train.checkpoint.files import MALFORMED
from gossamer.train.checkpoint.state import refuse_other_state
from gossamer.train.engine.bucket import copy_state
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.parameter_views import copy_parameters
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.synchronizers.base import NamedState, Synchronizer
from gossamer.version import __version__

SessionState = Mapping[str, Any]
REMEDY = "Run with what it was written with"
REMEDIES = {
    "layout": "The layout is a hash of the parameters' names, shapes and dtypes. Build the model that it was written "
    "with, parameters of session.add_parameters() included, before gossamer.attach"
}


def session_state(
    recipe: Recipe, layout: str, transport: Transport, synchronizer: Synchronizer, *, owed: NamedState, **about: Any
) -> dict[str, Any]:
    """owed: gradients of a recipe before, beside what this one remembers; about: more that a resumed run reads."""
    state = synchronizer.remembered()
    for name, tensors in owed.items():
        state.setdefault(name, {}).update(tensors)
    return {
        **about,
        "rank": transport.rank,
        "world": transport.world,
        "recipe": repr(recipe),
        "layout": layout,
        "links": transport.links,
        "step": synchronizer.step,
        "passes": synchronizer.passes,
        "state": state,
        "progress": synchronizer.progress(),
    }


def restore(
    states: Sequence[SessionState], mine: SessionState, transport: Transport, synchronizer: Synchronizer
) -> None:
    """Go on from `states`: this rank's own, or those of all ranks of another world size. mine: the state as it is."""
    own = own_state(states, transport)
    state = reshard.taken_up(own, mine) if own["world"] == mine["world"] else reshard.fold(states, mine)
    refuse_misfit(state, mine)
    transport.links = state.get("links", "")
    if state["progress"]:
        synchronizer.resume(state["progress"], state["state"])
    else:
        synchronizer.begin_at(state["step"])  # saved by a world of one


def own_state(states: Sequence[SessionState], transport: Transport) -> SessionState:
    """This rank's state; the first where another number of workers wrote them. Raises CheckpointError for no state."""
    for state in states or ({},):
        refuse_other_state(state)
    return states[transport.rank if len(states) == transport.world else 0]


def refuse_misfit(state: SessionState, mine: SessionState) -> None:
    """Raise CheckpointError for a session's saved state that belongs to another run."""
    for key in ("recipe", "layout", "world", "rank"):
        if state[key] != mine[key]:
            raise CheckpointError(
                f"this checkpoint's {key} is {state[key]!r}, this session's is {mine[key]!r}: what was remembered "
                f"would not fit. {REMEDIES.get(key, REMEDY)}, or begin in an empty directory."
            )


def compare_parameters(check: ParameterCheck, group: GroupCalls, step: int) -> None:
    """Raise MismatchError, or notice, where ranks in lock step are about to save different parameters."""
    if group.transport.world > 1 and check.looks:
        texts = group.all_gather_text(check.text())
        check.compare(dict(enumerate(texts)), f"in the checkpoint of step {step}", kind="saved")


def about(session: SessionState, run: str) -> dict[str, str]:
    """What a manifest says of the run. session: a session_state."""
    return {"gossamer": __version__, "recipe": session["recipe"], "layout": session["layout"], "run": run}


def refuse_other_optimizer(tree: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise CheckpointError, before anything is loaded, for what another kind of optimizer remembered."""
    written, mine = tree.get("optimizer_class"), type(optimizer).__name__
    if written is not None and written != mine:
        raise CheckpointError(
            f"this checkpoint was written with {written}, and this session has {mine}, which remembers other things of "
            f"each parameter. Build {written}(model.parameters(), ...) before gossamer.attach; or, to begin anew with "
            f"{mine}, load the model alone and save into an empty directory."
        )


@contextmanager
def taking_up(directory: str | os.PathLike[str], tree: Mapping[str, Any], optimizer: Optimizer) -> Iterator[None]:
    """Raise CheckpointError where what a checkpoint holds cannot be put into this run's parts."""
    refuse_other_optimizer(tree, optimizer)
    try:
        yield
    except GossamerError:
        raise
    except MALFORMED as error:
        raise CheckpointError(
            f"what {os.fspath(directory)!r} holds does not fit this run ({type(error).__name__}: {error}), and some of "
            "its parts may have been loaded already. Build the model, the optimizer and all that is tracked as in the "
            "run that wrote it, or begin in an empty directory."
        ) from error


def restart_resharded(
    found: LoadedCheckpoint,
    parameters: Mapping[str, Parameter],
    loop: LoopState,
    synchronizer: Synchronizer,
    rank: int,
) -> None:
    """After another world size wrote `found`: begin with what its workers agreed on, and say so."""
    if not found.news:
        return
    agreed = reshard.agreed(found.sessions)
    state = {name: tensor for name, tensor in {**parameters, **loop.averaged()}.items() if name in agreed}
    with loop.copies.following(parameters.values()):
        copy_parameters(agreed, state)
    synchronizer.restart()
    if rank == 0:
        events.notice(found.news)


def copy_kept(old: Mapping[str, Mapping[str, Tensor]], new: NamedState, without: Collection[str]) -> None:
    """Copy what `old` holds about parameters into `new`, except those in `without` and all rounding debts."""
    kept = {name: state for name, state in new.items() if name not in without}
    copy_state(old, {name: {key: state[key] for key in state if not is_owed(key)} for name, state in kept.items()})
