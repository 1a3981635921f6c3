"""Attach: checks a model and an optimizer, resolves the recipe and opens the session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import automatic, resolve
from gossamer.base.kernels.library import missing_kernels
from gossamer.comm.elastic.joined_run import is_elastic, join_run
from gossamer.errors import AttachError
from gossamer.events import RecordOption
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.parameter_check import Verify
from gossamer.train.session.loop_scaler import Scaler, scaler_of_parts, within_wrapper
from gossamer.train.session.model_parts import ModelParts
from gossamer.train.session.recipe_choice import Written, chosen_recipe, refuse_small_batch, with_global_batch
from gossamer.train.session.session import Session
from gossamer.train.session.step_spans import begin_tracing
from gossamer.train.session.transport_setup import begin_reports, model_group, transport_for
from gossamer.train.session.validation import (
    check_devices,
    innermost,
    refuse,
    refuse_foreign_parameters,
    refuse_other_kinds,
    refuse_sharding,
    refuse_sparse_gradients,
    refuse_swapping,
    sessions_of,
)
from gossamer.train.sharding.replica_mesh import (
    DeviceMesh,
    refuse_inner_replicas,
    refuse_recipe,
    refuse_unsharded,
    replica_ranks,
)
from gossamer.train.world_state import WorldState, current


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    recipe: Written = None,
    *,
    scaler: Scaler | None = None,
    clip_norm: float | None = None,
    verify: Verify = "warn",
    verify_every: int | None = None,
    scheduler: Stateful | None = None,
    record: RecordOption = None,
    log_to: Iterable[str] = (),
    replace: bool = False,
    global_batch: int | None = None,
    batch: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Session:
    """Train `model` together with the other workers of this job, talking as `recipe` says; None means Dense(), and
    "auto" a recipe that is chosen while training, as links and gradients are measured.

    Works in place: the model's class, its state_dict and the loop stay as they are. When loss.backward() returns,
    gradients are averaged. scaler: the loop's GradScaler, so that all ranks skip the same steps; clip_norm: the largest
    norm of all averaged gradients together, applied before each optimizer step (compressors that own momentum have an
    argument of their own for it, DGC(clip=1.0), since what they average has momentum in it). scheduler: one that
    checkpoints hold; session.track(name=...) takes more. A wrapper around the optimizer, such as Accelerate's, is seen
    through; the GradScaler in it counts as `scaler`.

    verify: what to do where ranks in lock step part, in a parameter or in the number of their steps: "warn" names rank
    and tensor once, "stop" raises MismatchError on every rank, "off" does not look. A difference is found within 100
    steps: reports carry a checksum of a part of all parameters, in turn. verify_every: every so many steps, of all of
    them, which reads the whole model: a difference is found within as many steps, and told since when.

    record: a file for the run's record, JSON of rank 0's numbers and of all that it logs, which outlives whatever ends
    the run; GOSSAMER_RECORD=FILE beats it. Without `gossamer run`, which shows more, rank 0 tells of its progress on
    standard error every ten seconds and at the end; record=False or GOSSAMER_QUIET=1 turns that off, and a world of one
    is quiet unless GOSSAMER_QUIET=0.
    log_to: tools that show its numbers meanwhile, such as ["tensorboard:runs/tensorboard", "prometheus:9400"];
    GOSSAMER_LOG_TO, with commas, beats it.
    replace: close a session that is open on this model, as where a cell of a notebook runs again.

    global_batch, batch: short for EveryStep(global_batch=..., batch=...): each optimizer step has the mean over
    global_batch samples, whatever the number of workers, also while it changes. batch: the samples of one backward pass
    on one worker, the DataLoader's batch_size, which is not known here. Each worker makes its share of the passes;
    optimizer.step() before the last finds no gradient and does nothing, and `session.accumulating` says so.

    mesh: the dimension of a DeviceMesh along which the model is replicated, device_mesh["replicate"]; the recipe runs
    among those ranks, which hold the same part of the model, and FSDP2 (fully_shard), tensor parallelism or a pipeline
    keeps what lies along other dimensions. Every rank of the job calls attach, each with its own part of the model; a
    parameter that is a DTensor is taken by its local shard, whose matrix is what compressors see. clip_norm is then of
    all parts together, and all skip the same steps.

    Raises AttachError for what cannot be served, RecipeError, and MismatchError where ranks are not alike.
    """
    refuse_other_kinds(model, optimizer, scaler)
    for session in sessions_of(model) if replace else ():
        session.close()
    refuse(model, sharded=mesh is not None)
    scaler = within_wrapper(optimizer) if scaler is None else scaler
    optimizer = innermost(optimizer)
    refuse_sharding(optimizer)
    refuse_foreign_parameters(optimizer, model)
    world = current()
    ranks = None if mesh is None else _replicas(mesh, model, world, scaler)
    size = world.size if ranks is None else len(ranks)
    check_devices(model, world.device, world.size)
    # A recipe must not change when workers come and go, so none is chosen for their number there
    written = chosen_recipe(recipe, world)
    if (auto := automatic(written)) is not None:  # imported here: most sessions have one recipe, and start sooner
        from gossamer.train.session.auto_recipe import choose_while_training, first_recipe, refuse_fixed_choice

        refuse_fixed_choice(auto, global_batch)
        if ranks is not None:
            raise AttachError(
                'recipe="auto" looks at whole gradients of all workers, and with mesh= each rank has those of a part '
                "of the model. Name a recipe: `gossamer explain` and `gossamer advise` compare them."
            )
        written = first_recipe(auto, model, optimizer, size)
    resolved = resolve(written, None if is_elastic() else size)
    resolved = with_global_batch(resolved, global_batch, batch)
    refuse_small_batch(resolved, join_run().most if is_elastic() else size)
    refuse_sparse_gradients(model, resolved)
    refuse_swapping(optimizer, resolved)
    if ranks is not None:
        refuse_recipe(model, resolved)
    if world.is_first and (caution := resolved.strategy.caution(resolved.compressor)):
        events.notice(caution)
    missing = missing_kernels()  # on each rank, which warns of them no more
    if missing and world.size > 1 and world.local_rank == 0:
        events.notice(missing)
    transport = transport_for(world, resolved, ranks)
    parts = None if ranks is None else ModelParts(model, model_group(ranks, world.size))
    recorded = begin_reports(world, record, log_to)
    begin_tracing(world)
    session = Session(
        model,
        optimizer,
        resolved,
        transport,
        world=world,
        scaler=scaler,
        clip_norm=clip_norm,
        verify=verify,
        verify_every=verify_every,
        parts=parts,
        scheduler=scheduler,
    )
    session.status.record = recorded
    if auto is not None:
        choose_while_training(session, auto)
    return session


def _replicas(mesh: DeviceMesh, model: nn.Module, world: WorldState, scaler: Scaler | None) -> Sequence[int]:
    """The ranks of the job that hold the same part of the model. Raises AttachError for what mesh= cannot have."""
    if is_elastic():
        raise AttachError(
            "mesh= names ranks that stay what they are, and in an elastic run workers come and go. Run a fixed number: "
            "gossamer run --workers 4 --max-restarts 1."
        )
    ranks = replica_ranks(mesh, world.size)
    refuse_inner_replicas(model, ranks)
    refuse_unsharded(model)
    if scaler is not None and scaler.is_enabled():
        raise scaler_of_parts()
    return ranks
