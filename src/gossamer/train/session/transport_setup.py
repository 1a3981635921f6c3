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
from gossamer.comm.elastic.joined_run import is_elastic, join_run
from gossamer.comm.environment import choose_interface, here, interfaces
from gossamer.comm.environment.run_settings import dedicated_servers, own_address, returns
from gossamer.comm.mesh.collective_selector import requested_collective
from gossamer.comm.mesh.encrypted import encrypted_mesh
from gossamer.comm.mesh.sealing import mesh_tls
from gossamer.comm.mesh.transport import mesh_transport
from gossamer.comm.network import read_network
from gossamer.comm.process_group import ProcessGroupTransport
from gossamer.comm.throttled import ThrottledTransport
from gossamer.errors import AttachError, ConnectError
from gossamer.events import AttachRequest, RecordOption
from gossamer.train.session.recipe_choice import refuse_inelastic
from gossamer.train.sharding.model_group import ModelGroup
from gossamer.train.sharding.replica_mesh import refuse_overlap
from gossamer.train.world_state import WorldState


def transport_for(world: WorldState, recipe: Recipe, ranks: Sequence[int] | None = None) -> Transport:
    """The transport of a new session, among `ranks` of the job; None: all. Raises AttachError for a restarted worker
    whose recipe moves in step."""
    if is_elastic():
        refuse_inelastic(recipe)
        return join_run().transport(requested_collective(recipe.topology.collective), world.device)
    if (own := world.own_transport()) is not None:
        return own
    if returns():
        if not all(_takes_back(stage) for stage in recipe.strategy.stages):
            raise AttachError(
                f"rank {world.rank} was lost and came back alone, and with {recipe} all workers move in step: there is "
                "no place between two steps where one could come in. Leave out --max-restarts, or let the parameters "
                "live on servers: gossamer run --servers 1 --recipe 'ParameterServer()'; or with single neighbours: "
                "gossamer run --recipe \"Gossip('pairwise')\"."
            )
        return DetachedTransport(world.rank, world.size)
    paced = os.environ.get("GOSSAMER_PACED")  # where no real emulation is possible, gossamer run asks for this one
    wish = requested_collective(recipe.topology.collective)
    transport = group_transport(world, wish, ranks)
    return ThrottledTransport(transport, read_network(paced, transport.world), wish) if paced else transport


def model_group(ranks: Sequence[int], size: int) -> ModelGroup:
    """The ranks that hold one replica of the model with this one. Every rank of the job, `size` in all, must call it.

    ranks: of the job, those that hold the same part of the model as this one. Raises AttachError where these do not
    divide the job.
    """
    job = ProcessGroupTransport()
    groups = sorted({tuple(json.loads(text)) for text in job.all_gather_text(json.dumps(ranks))})
    refuse_overlap(groups, size)
    replica = sorted(group[ranks.index(job.rank)] for group in groups)
    training = ProcessGroupTransport(replica)
    return ModelGroup(training, training.part(training.world), job, json.dumps(groups) if len(groups) > 1 else "")


def _takes_back(stage: Stage) -> bool:
    """Whether a restarted worker finds parameters to go on from, and no rank waits for it at a step."""
    if isinstance(stage, ServerStage):
        return bool(dedicated_servers())
    return isinstance(stage, GossipStage) and not stage.in_lock_step


def group_transport(world: WorldState, wish: str, ranks: Sequence[int] | None = None) -> Transport:
    """The process group of `ranks`, of all by default, with Gossamer's own TCP mesh, which serves GPUs through this
    machine's memory; where all have one, NCCL stays beside it, and the faster is taken.

    In a run that encrypts (--tls) the mesh is sealed, and alone. Raises ConnectError where it cannot be.
    """
    engine, address = ProcessGroupTransport(ranks), _listening_address()
    if (tls := mesh_tls()) is not None:
        return encrypted_mesh(engine, address, tls, wish, device=world.device)
    return mesh_transport(engine, address, wish, device=world.device)


def _listening_address() -> str:
    """The address of the chosen interface, or of the one towards rank 0 where the script made the process group."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return own_address()
    try:
        towards = choose_interface(here())
    except ConnectError:  # undecidable: loopback is not reached from elsewhere, and torch's collectives are used
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
