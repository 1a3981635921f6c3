"""Transport setup: chooses the transport of a session from the world, the recipe and the environment."""

from __future__ import annotations

import os

from gossamer.environment import choose_interface, here, interfaces
from gossamer.environment.run_settings import dedicated_servers, own_address, returns
from gossamer.errors import AttachError, ConnectError
from gossamer.network import read_network
from gossamer.recipes.recipe import Recipe
from gossamer.runtime.transport import Transport
from gossamer.session.elastic_recipes import refuse_inelastic
from gossamer.strategies import GossipStage, ServerStage, Stage
from gossamer.transports.detached import DetachedTransport
from gossamer.transports.elastic.joined_run import is_elastic, join_run
from gossamer.transports.mesh.collective_selector import ENGINE, requested_collective
from gossamer.transports.mesh.encrypted import encrypted_mesh
from gossamer.transports.mesh.sealing import mesh_tls
from gossamer.transports.mesh.transport import mesh_transport
from gossamer.transports.process_group import ProcessGroupTransport
from gossamer.transports.throttled import ThrottledTransport
from gossamer.world import World


def transport_for(world: World, recipe: Recipe) -> Transport:
    """The transport of a new session. Raises AttachError for a restarted worker whose recipe moves in step."""
    if is_elastic():
        refuse_inelastic(recipe)
        return join_run().transport(requested_collective(recipe.topology.collective))
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
    transport = group_transport(world, wish)
    return ThrottledTransport(transport, read_network(paced, world.size), wish) if paced else transport


def _takes_back(stage: Stage) -> bool:
    """Whether a restarted worker finds parameters to go on from, and no rank waits for it at a step."""
    if isinstance(stage, ServerStage):
        return bool(dedicated_servers())
    return isinstance(stage, GossipStage) and not stage.in_lock_step


def group_transport(world: World, wish: str) -> Transport:
    """The process group, with Gossamer's own TCP mesh where all tensors live on CPUs.

    In a run that encrypts (--tls) the mesh is sealed, and serves GPUs as well, through this machine's memory. Raises
    ConnectError where it cannot be.
    """
    if (tls := mesh_tls()) is not None:
        return encrypted_mesh(ProcessGroupTransport(), _listening_address(), tls, wish)
    return mesh_transport(
        ProcessGroupTransport(), _listening_address(), ENGINE if world.device.type == "cuda" else wish
    )


def _listening_address() -> str:
    """The address of the chosen interface, or of the one towards rank 0 where the script made the process group."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return own_address()
    try:
        towards = choose_interface(here())
    except ConnectError:  # undecidable: loopback is not reached from elsewhere, and torch's collectives are used
        towards = None
    return interfaces().get(towards or "", own_address())
