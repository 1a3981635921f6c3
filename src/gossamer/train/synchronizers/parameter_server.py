"""Server synchronizer: pushes gradients to parameter servers around the optimizer's step, and pulls parameters."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import ServerStrategy
from gossamer.algorithms.strategies.parameter_server import ASYNC
from gossamer.base.layout import Layout
from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.base.transport import Transport
from gossamer.comm.environment.run_settings import dedicated_servers
from gossamer.comm.environment.survivor_calls import session_calls
from gossamer.comm.runtime.peer_thread import PeerThread, run_peer_script
from gossamer.errors import AttachError, CheckpointError, LoopError, PeerLost
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.report import Presence
from gossamer.train.parameter_server.client.client import Client, RunTotals, StepResult
from gossamer.train.parameter_server.client.partition import servers_for
from gossamer.train.parameter_server.client.shard_client import ShardClient
from gossamer.train.synchronizers.base import NamedState, SyncContext, Synchronizer
from gossamer.train.synchronizers.peer_endpoints import Tell, close_now, connect_to_servers

WIDEST_BYTES = 8


class ServerSynchronizer(Synchronizer):
    """Pushes gradients at every optimizer step, and overwrites the parameters with the servers'.

    In mode "async" push and pull of one step overlap with the next; in the others a worker has its own step's outcome
    before it goes on. The local optimizer finds no gradients and does nothing: the servers run its copy.
    """

    in_step = False

    def __init__(
        self,
        strategy: ServerStrategy,
        parameters: Mapping[str, Parameter],
        buckets: Sequence[Bucket],
        optimizer: Optimizer | None,
        recipe: Recipe,
        context: SyncContext,
        tell: Tell,
    ) -> None:
        super().__init__()
        loop, transport = context.loop, context.transport
        _refuse(loop)
        if optimizer is None:
            raise AttachError(
                "servers make the optimizer's step, so they must know its rule. Name one of torch's for the session of "
                "arrays: engine.Session(..., server_optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.1))."
            )
        if optimizer.state and transport.rank == 0:
            events.notice(
                "the optimizer remembers something already, such as momenta, and servers make it anew: they begin "
                "without. Attach before the first step, or write EveryStep()"
            )
        self._buckets, self._parameters, self._loop, self._rank = buckets, parameters, loop, transport.rank
        self._tell, self._world = tell, transport.world
        self._servers_saved: dict[int, Any] = {}  # by number, of this worker's share
        self._saved_at = -1  # the step in which they were fetched
        self._synchronous = strategy.mode != ASYNC
        self._overlapped = strategy.mode == ASYNC
        largest = WIDEST_BYTES * sum(parameter.numel() for parameter in parameters.values())
        self._endpoints = connect_to_servers(transport.rank, transport.world, strategy.shards, largest, tell)
        self._close = weakref.finalize(self, close_now, self._endpoints, os.getpid())  # at exit, too
        try:
            self._client = self._begin(transport, optimizer, recipe, context.seed)
            if dedicated_servers():  # others are lost with their worker
                self.roll_call = session_calls(transport.rank, transport.world, self._silent)
        except BaseException:  # or a server would stay that no worker trains with
            self._close()
            raise
        self.step = self._client.step  # servers go on where this worker was, if it comes back
        self._in_flight: PeerThread | None = None
        self._served_bytes = self._endpoints.bytes_served()

    def _begin(self, transport: Transport, optimizer: Optimizer, recipe: Recipe, seed: int) -> Client:
        """Hand the parameters to the servers, or take over theirs."""
        client = Client(
            transport.rank,
            transport.world,
            self._parameters,
            optimizer,
            recipe,
            shards=self._endpoints.servers,
            seed=seed,
            local_server=self._endpoints.local_server,
        )
        _refuse_large(self._parameters, client.shard_clients, self._endpoints.part_bytes)
        run_peer_script(client.begin(), self._endpoints.me)
        client.apply_pull()
        return client

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def _silent(self) -> Collection[int]:
        """The workers that the first server does not hear; none where it does not answer."""
        try:
            silent: Collection[int] = run_peer_script(self._client.silent(), self._endpoints.me)
        except PeerLost:
            return ()
        return silent

    def merge(self) -> Mapping[str, Tensor]:
        """The servers' parameters as they are now, uncompressed."""
        self._apply_pull()
        exact: dict[str, Tensor] = run_peer_script(self._client.exact(), self._endpoints.me)
        return exact

    # -- around the optimizer ------------------------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        if closure:
            raise LoopError(
                "with parameter servers the optimizer's step is made there, from one gradient that is pushed, and a "
                "closure computes gradients within the step. Call backward(), then optimizer.step()."
            )
        self._wait()
        self._client.gather(
            {name: parameter.grad for name, parameter in self._parameters.items()}, self.controls.weight
        )
        for parameter in self._parameters.values():
            parameter.grad = None
        self._client.apply_pull()  # of the step before; only this thread writes parameters
        self._in_flight = self._endpoints.me.start(self._client.push_pull())

    def after_step(self) -> None:
        self.step += 1
        if not self._overlapped:
            self._apply_pull()
        if self.asked_to_stop and not self._client.stopping:
            run_peer_script(self._client.stop(), self._endpoints.me)
        self.stopping = self._client.stopping

    def _wait(self) -> None:
        """Wait for the push and pull in flight, if any."""
        if self._in_flight is None:
            return
        handle, self._in_flight = self._in_flight, None
        began = time.perf_counter()
        result: StepResult = handle.wait()
        answered, served = time.perf_counter(), self._endpoints.bytes_served()
        if active.recorder is not None:
            active.recorder.add(SpanKind.WAITING, began, answered)
        costs = {
            "waiting_seconds": answered - began,
            "encode_seconds": result.encode_seconds,
            "wire_seconds": result.wire_seconds,
            "decode_seconds": result.decode_seconds,
            "bytes_sent": result.bytes_sent + served - self._served_bytes,
            "bytes_pulled": result.bytes_received,
        }
        self._served_bytes = served
        self._loop.judged("pass", None if result.finite else (self._rank, "gradients"))
        self._loop.ended(not result.finite, costs)

    def _apply_pull(self) -> None:
        self._wait()
        self._client.apply_pull()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def end_epoch(self) -> int:
        """Rounds do not wait for a worker that has run out of data, and all begin the next epoch together."""
        self._apply_pull()
        if self._synchronous:
            run_peer_script(self._client.barrier(), self._endpoints.me)
            self._client.apply_pull()
        return 0

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        """Wait until no worker pushes, and fetch the state of every server: each worker that of its share."""
        self._apply_pull()
        self._tell(f"{self.step}")
        self._servers_saved = {
            number: run_peer_script(self._client.server_state(number), self._endpoints.me) for number in self._share
        }
        self._saved_at = self.step

    @property
    def _share(self) -> range:
        """The servers whose state this worker saves."""
        return range(self._rank, len(self._client.shard_clients), self._world)

    def flush(self) -> None:
        raise LoopError("servers hold these parameters in the shapes they had at attach. Attach a new session.")

    def end_run(self) -> None:
        """Wait until all workers are done, and take over their common parameters."""
        self.end_calls()
        self._apply_pull()
        totals: RunTotals = run_peer_script(self._client.end(), self._endpoints.me)
        self._client.apply_final()
        if totals.missed:
            events.notice(
                f"worker {self._rank} was not heard when the others ended, so its steps since then count for nobody; "
                "it takes over the parameters that they ended with"
            )
        events.emit(events.ServersTold(applied=totals.applied, late=totals.late, staleness=totals.staleness))
        self._endpoints.drain()

    def close(self) -> None:
        self.end_calls()
        self._close()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def remembered(self) -> NamedState:
        return {}

    def progress(self) -> dict[str, Any]:
        """With the servers' state as `meet_to_save` has fetched it in this step."""
        found = {"step": self.step, "world": self._world, "client": self._client.state_dict()}
        if self._saved_at == self.step:
            found["servers"] = self._servers_saved
        return found

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Give all servers back what they had. Every worker comes here; none pushes meanwhile."""
        problem = self._misfit(progress)
        self._apply_pull()
        name = self._tell(secrets.token_hex(8))[0]
        if not problem:
            try:
                for number, state in progress["servers"].items():
                    run_peer_script(self._client.restore_server(number, state, name), self._endpoints.me)
            except CheckpointError as error:
                problem = str(error)
        lost = [f"rank {who}: {text}" for who, text in enumerate(self._tell(problem)) if text]
        if lost:
            raise CheckpointError(f"the servers were not given back what they had: {'; '.join(lost)}")
        self._client.load_state_dict(progress["client"])
        run_peer_script(self._client.begin(), self._endpoints.me)
        self._client.apply_pull()
        self.step, self._saved_at = self._client.step, -1
        self._tell("")  # nobody pushes before all have joined

    def _misfit(self, progress: Mapping[str, Any]) -> str:
        """Why servers cannot go on from this, or "" where they can."""
        if progress.get("world") != self._world:
            return (
                f"{progress.get('world')} workers saved it, and these are {self._world}: servers know each worker's "
                "steps. Run as many workers"
            )
        if "servers" not in progress:
            return (
                "it is without the servers' state, which session.save() writes and session.state_dict() alone does not "
                "know. Write session.save(directory) and session.load(directory)"
            )
        if set(progress["servers"]) != set(self._share):
            return f"it has the state of servers {sorted(progress['servers'])}, where {list(self._share)} are due"
        return ""


def _refuse_large(parameters: Mapping[str, Tensor], shard_clients: Sequence[ShardClient], part_bytes: int) -> None:
    """A server is given its shard in one message: raise AttachError where that would be too large."""
    largest = max(sum(block.flat.nbytes for block in each.gradients) for each in shard_clients)
    if largest <= part_bytes:
        return
    itemsizes = {name: parameter.element_size() for name, parameter in parameters.items()}
    servers = servers_for(
        Layout.of({name: tuple(each.shape) for name, each in parameters.items()}), part_bytes, itemsizes
    )
    if servers is None:
        raise AttachError(
            f"one row of a tensor is larger than the {part_bytes:,} bytes that a server is told in one message, and "
            "rows are not divided. Write EveryStep()."
        )
    raise AttachError(
        f"a part of this model has {largest:,} bytes, and a server is told at most {part_bytes:,} in one message. "
        f"Start more servers, so that each holds less: gossamer run --servers {servers} (with no smaller shards= in "
        "the recipe)."
    )


def _refuse(loop: LoopState) -> None:
    """Raise AttachError for hooks around the optimizer's step, which servers make."""
    if loop.scale() is not None:
        raise AttachError(
            "a GradScaler expects the optimizer's step here, and with parameter servers it is made there. Train in "
            "bfloat16, which needs no scaler, or write EveryStep()."
        )
    if loop.clips:
        raise AttachError(
            "clip_norm clips the mean gradient, and with parameter servers that is made there. Clip each worker's own "
            "between backward() and step(): torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
        )
