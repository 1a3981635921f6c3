"""gossamer.attach: validates model and optimizer, resolves the recipe and opens a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace as replace_fields

from torch import nn
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import automatic, resolve
from gossamer.base.compiled import reported_by_launcher
from gossamer.base.kernels.library import missing_kernels
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import AttachError
from gossamer.events import RecordOption
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.parameter_check import Verify
from gossamer.train.session.loop_scaler import Scaler, scaler_of_parts, within_wrapper
from gossamer.train.session.model_parts import ModelParts
from gossamer.train.session.recipe_choice import (
    Written,
    check_steps,
    chosen_recipe,
    notice_few_rounds,
    refuse_small_batch,
    with_global_batch,
)
from gossamer.train.session.session import Session
from gossamer.train.session.step_spans import begin_tracing
from gossamer.train.session.transport_setup import begin_reports, model_group, most_workers, transport_for
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
    balance: bool = False,
    mesh: DeviceMesh | None = None,
    steps: int | None = None,
) -> Session:
    """Attach a model and an optimizer to the other workers of this job and return the session that synchronizes them.

    Works in place: the class of the model, its state_dict and the training loop do not change. With the default
    recipe, gradients are averaged over all workers when loss.backward() returns.

    Args:
        model: the module to train, on world.device.
        optimizer: its optimizer. Wrappers such as Accelerate's are unwrapped; a GradScaler in one counts as `scaler`.
        recipe: text, Recipe or terms, such as "DiLoCo(period=50) + Int8()". None means Dense(). "auto" chooses a recipe
            during training from measured bandwidth and gradients.
        scaler: the GradScaler of the loop; all ranks then skip the same steps.
        clip_norm: maximum norm of all averaged gradients together, applied before each optimizer step. Compressors
            that own the optimizer's momentum average values that include momentum; they have an argument of their own,
            such as DGC(clip=1.0).
        verify: reaction when ranks in lock step differ in a parameter or in their number of steps. "warn" names rank
            and tensor once, "stop" raises MismatchError on every rank, "off" disables the check. Reports carry a
            checksum of a part of the parameters in turn, so a difference is found within 100 steps.
        verify_every: also compare all parameters every `verify_every` steps. This reads the whole model; the message
            then names the interval in which the difference arose.
        scheduler: a learning rate scheduler to include in checkpoints; session.track(name=...) adds other objects.
        record: file for the record of the run: JSON with the metrics of rank 0 and everything it logs, kept however
            the run ends. GOSSAMER_RECORD=FILE overrides it. Without `gossamer run`, rank 0 prints its progress to
            standard error every ten seconds and at the end; record=False or GOSSAMER_QUIET=1 disables that. With one
            worker nothing is printed unless GOSSAMER_QUIET=0.
        log_to: exporters for live metrics, such as ["tensorboard:runs/tensorboard", "prometheus:9400"].
            GOSSAMER_LOG_TO, separated by commas, overrides it.
        replace: first close any open session of this model, for example when a notebook cell runs again.
        global_batch, batch: short for EveryStep(global_batch=..., batch=...). Each optimizer step uses the mean over
            `global_batch` samples at any number of workers, also when the number changes. `batch` is the number of
            samples of one backward pass on one worker (the batch_size of the DataLoader). Each worker accumulates its
            share of the passes; optimizer.step() before the last pass has no gradient and does nothing, and
            `session.accumulating` is then True.
        balance: short for EveryStep(..., balance=True): shares of the global batch follow the workers' measured
            speeds. Without `batch` each worker makes one pass of session.batch_size samples per step.
        mesh: the dimension of a DeviceMesh along which the model is replicated, such as device_mesh["replicate"]. The
            recipe runs among its ranks, which hold the same shards; FSDP2 (fully_shard), tensor parallelism or
            pipelines manage the other dimensions. Every rank of the job calls attach with its own part of the model.
            Compressors see the local shard of a DTensor. clip_norm applies to all parts together, and all parts skip
            the same steps.
        steps: optimizer steps of the training, if they are known. The line of progress then has the time that is
            left, "auto" also uses recipes that need a long training (Auto(steps=...)), and rank 0 gives notice of a
            recipe with too few rounds in so many steps.

    Returns:
        The open session. Close it with session.close() after the loop.

    Raises:
        AttachError: the model, the optimizer or the combination of arguments is not supported.
        RecipeError: the recipe is invalid.
        MismatchError: models, options or versions differ between ranks.

    Example:
        world = gossamer.init()
        session = gossamer.attach(model, optimizer, "PowerSGD(rank=4)", clip_norm=1.0)
    """
    refuse_other_kinds(model, optimizer, scaler)
    check_steps(steps)
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
    # The recipe must not change when workers join or leave, so an elastic run resolves it without their number
    written = chosen_recipe(recipe, world)
    if (auto := automatic(written)) is not None:  # imported here: most sessions have one recipe, and start sooner
        from gossamer.train.session.auto_recipe import choose_while_training, first_recipe, refuse_fixed_choice

        steps = auto.steps or steps
        auto = replace_fields(auto, steps=steps)
        refuse_fixed_choice(auto, global_batch)
        if ranks is not None:
            raise AttachError(
                'recipe="auto" measures whole gradients of all workers, but with mesh= each rank holds those of a part '
                "of the model. Name a recipe: `gossamer explain` and `gossamer advise` compare them."
            )
        written = first_recipe(auto, model, optimizer, size)
    resolved = resolve(written, None if is_elastic() else size)
    resolved = with_global_batch(resolved, global_batch, batch, balance=balance)
    refuse_small_batch(resolved, most_workers(size))
    refuse_sparse_gradients(model, resolved)
    refuse_swapping(optimizer, resolved)
    if ranks is not None:
        refuse_recipe(model, resolved)
    if world.is_first and (caution := resolved.strategy.caution(resolved.compressor)):
        events.notice(caution)
    if steps is not None and world.is_first and size > 1:
        notice_few_rounds(resolved, steps)
    missing = missing_kernels()  # called on each rank, since the call marks the warning as given
    if missing and not reported_by_launcher() and world.size > 1 and world.local_rank == 0:
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
        steps=steps,
    )
    session.status.record = recorded
    if auto is not None:
        choose_while_training(session, auto)
    return session


def _replicas(mesh: DeviceMesh, model: nn.Module, world: WorldState, scaler: Scaler | None) -> Sequence[int]:
    """Ranks that hold the same part of the model. Raises AttachError if mesh= cannot be used here."""
    if is_elastic():
        raise AttachError(
            "mesh= names a fixed set of ranks, but workers of an elastic run join and leave. Use a fixed number: "
            "gossamer run --workers 4 --max-restarts 1."
        )
    ranks = replica_ranks(mesh, world.size)
    refuse_inner_replicas(model, ranks)
    refuse_unsharded(model)
    if scaler is not None and scaler.is_enabled():
        raise scaler_of_parts()
    return ranks
