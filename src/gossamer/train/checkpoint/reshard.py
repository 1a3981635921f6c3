"""Resharding: converts the state of a checkpoint to another world size or other wrappers in the recipe.

Unsent residuals are kept, and the epoch continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.compressors.error_feedback import Feedback
from gossamer.algorithms.compressors.feedback_rules import begins_from, debtor
from gossamer.algorithms.compressors.hierarchical import Hierarchical
from gossamer.algorithms.compressors.per_worker import PerWorker
from gossamer.algorithms.compressors.sharded import UNSENT, Sharded, is_group_residual
from gossamer.algorithms.compressors.sparse_allreduce import SparseSum
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import AveragingStage, GossipStage
from gossamer.base.term import Term
from gossamer.errors import CheckpointError, RecipeError
from gossamer.train.checkpoint.state import AGREED_KEY, FROM_KEY
from gossamer.train.sampler import taken_up as taken_up_position

State = Mapping[str, Any]  # a Session.state_dict
Remembered = dict[str, Tensor]  # one parameter's state, by key


def fold(states: Sequence[State], current: State) -> dict[str, Any]:
    """The initial state of a new worker. states: of the old workers, by rank; current: the new worker's own.

    `residual' = mean over workers of residual + sum over workers of owed`, the same on every new worker; `owed' = 0`
    `known' =` the last mean, which is the sum of all differences sent
    law: `mean residual + owed` stays the same; the mean of `known'` is the last mean
    All other state is averaged as well, unless it was equal on all workers.
    """
    first = states[0]
    if [(state["rank"], state["step"]) for state in states] != [
        (rank, first["step"]) for rank in range(first["world"])
    ]:
        raise CheckpointError(
            f"a worker of {current['world']} received {len(states)} of the {first['world']} states that "
            f"{first['world']} workers had at one step, so unsent residuals in the others would be lost. Pass all of "
            "them, in order of rank: session.load_state_dict(*states)."
        )
    same_recipe = alike(first["recipe"], current["recipe"])
    fits = same_recipe and first["layout"] == current["layout"]
    return {
        **first,
        "rank": current["rank"],
        "world": current["world"],
        "recipe": current["recipe"] if same_recipe else first["recipe"],
        "state": {
            name: _begun(remembered, [state["state"].get(name, {}) for state in states])
            for name, remembered in (current["state"].items() if fits else ())
        },
        "progress": _grounded([state["progress"] for state in states]),
    }


def taken_up(saved: State, current: State) -> State:
    """The initial state of a worker that resumes from `saved`. current: its state before.

    Wrappers chosen for the world size may differ if both keep the same state under the same names: a residual is a part
    of this worker's own gradients with any of them, and is kept bit for bit. Rank 0 prints a notice. Raises
    CheckpointError if their state differs.
    """
    if saved["recipe"] == current["recipe"] or not alike(saved["recipe"], current["recipe"]):
        return saved  # nothing to do, or another recipe, which the session refuses
    if _shapes(saved["state"]) != _shapes(current["state"]):
        raise CheckpointError(
            f"this checkpoint was written with {saved['recipe']}, but this session uses {current['recipe']}, which has "
            "other state, so unsent residuals would be lost. Write the recipe of the checkpoint with its wrappers: "
            f'gossamer.attach(model, optimizer, "{saved["recipe"]}").'
        )
    if current["rank"] == 0 and current["state"]:
        events.notice(
            f"the checkpoint was written with {saved['recipe']}; the run continues with {current['recipe']}: residuals "
            "are restored bit for bit, but later messages differ. To continue exactly, write the recipe of the "
            "checkpoint with its wrappers"
        )
    return {**saved, "recipe": current["recipe"]}


def agreed(states: Sequence[State]) -> Remembered:
    """Parameters and other state, by name, to start from after local training: the mean over `states` of the agreed
    values; if workers' own parameters are merged, of the values that each worker had after its last round."""
    key = FROM_KEY if _merges_own(states[0]["recipe"]) else AGREED_KEY
    names = [name for name, remembered in states[0]["state"].items() if key in remembered]
    parameters = {name: _mean([state["state"][name][key] for state in states]) for name in names}
    others: Sequence[Remembered] = [state["progress"].get("agreed_state", {}) for state in states]
    return {**parameters, **{name: _mean([each[name] for each in others]) for name in others[0]}}


def _merges_own(recipe: str) -> bool:
    resolved = resolve(recipe)
    stage = resolved.strategy.steady_stage
    return isinstance(stage, AveragingStage) and stage.strategy.merges_own(resolved.compressor)


def _grounded(all_progress: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Progress without rounds in flight and local steps: all workers continue from the agreed parameters. Accumulated
    gradients and their weights are averaged, since workers may have made different numbers of passes.
    """
    progress = {key: value for key, value in all_progress[0].items() if key != "trained"}  # ranks of that exchange
    flights = {"flights": [], "weights": [0.0] * len(progress["weights"])} if "flights" in progress else {}
    sums = [each["accumulated"] for each in all_progress if "accumulated" in each]
    if not sums:
        return {**progress, **flights}
    weight = sum(each["weight"] for each in sums) / len(sums)
    used = sorted({name for each in sums for name in each["used"]})
    return {**progress, **flights, "accumulated": {**sums[0], "weight": weight, "used": used}}


def fold_positions(worlds: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """Positions at which a worker's shards continue, given the states of all old workers' worlds by rank.

    Samples drawn so far are excluded, and the rest is divided again, as when workers join or leave.
    """
    return {
        kind: [taken_up_position(same, rank, world) for same in zip(*(each[kind] for each in worlds), strict=True)]
        for kind in worlds[0]
    }


def describe(directory: str, step: int, writers: int, world: int, *, recipe: str, apart: bool) -> str:
    """A notice about a resharded checkpoint. apart: whether the workers of its `recipe` trained separately."""
    who, them = ("one worker", "it") if writers == 1 else (f"{writers} workers", f"the {writers}")
    if writers == 1:
        fate = "it had no unsent residuals"
    elif world == 1 or _in_one_node(recipe, world):
        alone = "one" if world == 1 else "a node"
        fate = f"unsent residuals of {them} are dropped, since {alone} alone sends nothing"
    else:
        fate = f"each starts with the mean of the unsent residuals of {them}"
    if apart and isinstance(resolve(recipe).strategy.steady_stage, GossipStage):
        fate += "; parameters are the mean of all workers' parameters"
    elif apart and _merges_own(recipe):
        fate = f"parameters are the mean of those after the last round, which includes the residuals of {them}"
    elif apart:
        fate += "; parameters are those of the last average, and later local steps are dropped"
    return (
        f"the checkpoint of step {step} in {directory} was written by {who}, and {world} continue from it: {fate}; "
        "the epoch continues at the same sample"
    )


def _in_one_node(recipe: str, world: int) -> bool:
    """Whether all workers are now one node, and only traffic between nodes leaves a residual."""
    nodes = [term for term in resolve(recipe).compressor.held() if isinstance(term, Hierarchical)]
    inside = any(isinstance(term, Feedback) for node in nodes[:1] for term in node.held())
    return inside and prod(node.per_node for node in nodes) >= world


def alike(written: str, now: str) -> bool:
    """Whether two recipes, as text, differ only in wrappers chosen by the world size, or in the workers that a
    PerWorker selects.
    """
    try:
        return written == now or _plain(written) == _plain(now)
    except RecipeError:  # written by another version
        return False


def _plain(text: str) -> Sequence[Term]:
    """A recipe without Sharded, SparseSum and tables of codecs, which share the residual of their inner compressor."""
    return [_unsharded(term) for term in resolve(text).terms]


def _shapes(state: Mapping[str, Mapping[str, Tensor]]) -> dict[tuple[str, str], torch.Size]:
    return {(name, key): tensor.shape for name, remembered in state.items() for key, tensor in remembered.items()}


def _unsharded(term: Term) -> Term:
    if isinstance(term, Sharded | SparseSum):
        return _unsharded(term.inner)
    if isinstance(term, PerWorker):
        term = replace(term, ranks="", hosts=None, below=None)
    held = {item.name: getattr(term, item.name) for item in fields(term)}  # type: ignore[arg-type]
    return replace(  # type: ignore[type-var]
        term, **{name: _unsharded(value) for name, value in held.items() if isinstance(value, Term)}
    )


def _begun(current: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> Remembered:
    """One parameter's initial state, in the new shapes of `current`."""
    begun: Remembered = {}
    for key, tensor in current.items():
        remote = [part[begins_from(key)] for part in parts if key in part]
        begun[key] = torch.zeros_like(tensor) if is_group_residual(key) else _mean(remote) if remote else tensor
    for key in {key: None for part in parts for key in part if is_group_residual(key)} if current else ():
        place, sign = debtor(key.removesuffix(UNSENT), begun)
        if sign < 0 or place not in begun:
            continue  # it starts from the last mean, which excludes the undelivered part; or one worker sends nothing
        pieces = torch.cat([part[key] for part in parts if key in part])  # shards are in rank order in memory
        begun[place] = begun[place] + pieces.as_strided(current[place].shape, current[place].stride())
    return begun


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean; the first tensor if all are equal or not floating-point."""
    first = tensors[0]
    if not first.is_floating_point() or all(torch.equal(tensor, first) for tensor in tensors[1:]):
        return first
    total = first.clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.div_(len(tensors))
