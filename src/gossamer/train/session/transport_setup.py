"""Transport setup: chooses the transport of a session from the world, the recipe and the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GossipStage, ServerStage, Stage
from gossamer.base.transport import Transport
from gossamer.comm.detached import DetachedTransport
from gossamer.comm.environment import choose_interface, here, interfaces
from gossamer.comm.environment.run_settings import dedicated_servers, is_elastic, own_address, returns
from gossamer.comm.mesh.collective_selector import requested_collective
from gossamer.comm.mesh.encrypted import encrypted_mesh
from gossamer.comm.mesh.sealing import mesh_tls
from gossamer.comm.mesh.transport import mesh_transport
from gossamer.comm.network import read_network
from gossamer.comm.process_group import ProcessGroupTransport
from gossamer.comm.throttled import ThrottledTransport
from gossamer.comm.tls_contexts import seals
from gossamer.errors import AttachError, ConnectError
from gossamer.events import AttachRequest, RecordOption
from gossamer.train.session.recipe_choice import refuse_inelastic
from gossamer.train.sharding.model_group import ModelGroup
from gossamer.train.sharding.replica_mesh import refuse_overlap
from gossamer.train.world_state import WorldState


def transport_for(world: WorldState, recipe: Recipe, ranks: Sequence[int] | None = None) -> Transport:
    """The transport of a new session, among `ranks` of the job; None means all. Raises AttachError for a restarted
    worker with a recipe in lock step."""
    if is_elastic():
        from gossamer.comm.elastic.joined_run import join_run  # most runs are not elastic, and start sooner

        run = join_run()
        refuse_inelastic(recipe, run.sizes, servers=len(dedicated_servers()))
        if run.agent.servers:
            return run.served_member()
        return run.transport(requested_collective(recipe.topology.collective), world.device)
    if (own := world.own_transport()) is not None:
        return own
    if returns():
        if not all(_takes_back(stage) for stage in recipe.strategy.stages):
            raise AttachError(
                f"rank {world.rank} was lost and restarted alone, but with {recipe} all workers are in lock step, so "
                "it cannot rejoin. Leave out --max-restarts, or use parameter servers: gossamer run --servers 1 "
                "--recipe 'ParameterServer()'; or single neighbors: gossamer run --recipe \"Gossip('pairwise')\"."
            )
        return DetachedTransport(world.rank, world.size)
    paced = os.environ.get("GOSSAMER_PACED")  # set by gossamer run if it cannot emulate a network
    requested = requested_collective(recipe.topology.collective)
    transport = group_transport(world, requested, ranks)
    return ThrottledTransport(transport, read_network(paced, transport.world), requested) if paced else transport


def most_workers(size: int) -> int:
    """The largest number of workers that this run can have. size: number of workers of a fixed run."""
    if not is_elastic():
        return size
    from gossamer.comm.elastic.joined_run import join_run

    return join_run().most


def model_group(ranks: Sequence[int], size: int) -> ModelGroup:
    """The ranks that hold one replica of the model with this one. Collective among all `size` ranks of the job.

    ranks: of the job, those that hold the same part of the model as this one. Raises AttachError if these groups do not
    divide the job.
    """
    job = ProcessGroupTransport()
    groups = sorted({tuple(json.loads(text)) for text in job.all_gather_text(json.dumps(ranks))})
    refuse_overlap(groups, size)
    replica = sorted(group[ranks.index(job.rank)] for group in groups)
    training = ProcessGroupTransport(replica)
    return ModelGroup(training, training.part(training.world), job, json.dumps(groups) if len(groups) > 1 else "")


def _takes_back(stage: Stage) -> bool:
    """Whether a restarted worker can receive parameters, and no rank waits for it at a step."""
    if isinstance(stage, ServerStage):
        return bool(dedicated_servers())
    return isinstance(stage, GossipStage) and not stage.in_lock_step


def group_transport(world: WorldState, requested: str, ranks: Sequence[int] | None = None) -> Transport:
    """The process group of `ranks` (default: all) with Gossamer's own TCP mesh, which copies GPU tensors through host
    memory. If all ranks have NCCL, it is opened as well, and the faster one is used.

    In a run that encrypts only the encrypted mesh is used. Raises ConnectError if it cannot be opened.
    """
    engine, address, tls = ProcessGroupTransport(ranks), _listening_address(), mesh_tls()
    if tls is not None or seals():
        return encrypted_mesh(engine, address, tls, requested, device=world.device)
    return mesh_transport(engine, address, requested, device=world.device)


def _listening_address() -> str:
    """The address of the chosen interface, or of the one towards rank 0 if the script made the process group."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return own_address()
    try:
        towards = choose_interface(here())
    except ConnectError:  # undecidable: loopback cannot be reached by other machines, and torch's collectives are used
        towards = None
    return interfaces().get(towards or "", own_address())


def begin_reports(world: WorldState, record: RecordOption, log_to: Iterable[str]) -> str:
    """Begin to report the session that is about to be attached. Returns the path of its record, or ""."""
    request = AttachRequest(
        record=record,
        log_to=log_to,
        rank=world.rank,
        local_rank=world.local_rank,
        world=world.size,
        is_first=world.is_first,
    )
    return events.begin_reports(request)
