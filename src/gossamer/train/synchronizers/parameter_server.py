"""Server synchronizer: pushes gradients to parameter servers at each optimizer step, and pulls parameters."""

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
from gossamer.comm.elastic.recognition import served
from gossamer.comm.environment.roll_call import session_calls
from gossamer.comm.environment.run_settings import dedicated_servers
from gossamer.comm.runtime.peer_thread import RunningScript, run_peer_script
from gossamer.errors import AttachError, CheckpointError, LoopError, PeerLost
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.step_decision import Presence
from gossamer.train.parameter_server.client.client import Client, RunTotals, StepResult
from gossamer.train.parameter_server.client.partition import servers_for
from gossamer.train.parameter_server.client.shard_client import ShardClient
from gossamer.train.synchronizers.base import SyncContext, Synchronizer
from gossamer.train.synchronizers.peer_endpoints import AllGatherText, close_now, connect_to_servers

WIDEST_BYTES = 8


class ServerSynchronizer(Synchronizer):
    """Pushes gradients at every optimizer step, and overwrites the parameters with those of the servers.

    In mode "async" push and pull of a step overlap with the next step; in the other modes the worker waits for the
    result of its own step. The local optimizer finds no gradients and does nothing: the servers run a copy of it.
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
        all_gather_text: AllGatherText,
    ) -> None:
        super().__init__()
        loop, transport = context.loop, context.transport
        self._check(loop, optimizer, transport.rank)
        self._buckets, self._parameters, self._loop, self._rank = buckets, parameters, loop, transport.rank
        self._all_gather_text, self._world = all_gather_text, transport.world
        # The servers know a worker that may come and go by its number, which no other process ever has
        member = served(transport)
        self._elastic = member is not None
        self._number = transport.rank if member is None else member.number
        self._servers_saved: dict[int, Any] = {}  # state by number of server, of this worker's share
        self._saved_at = -1  # the step at which it was fetched
        self._synchronous = strategy.mode != ASYNC
        self._overlapped = strategy.mode == ASYNC
        largest = WIDEST_BYTES * sum(parameter.numel() for parameter in parameters.values())
        self._endpoints = connect_to_servers(self._number, transport.world, strategy.shards, largest, all_gather_text)
        self._close = weakref.finalize(self, close_now, self._endpoints, os.getpid())  # at exit, too
        try:
            self._client = self._begin(optimizer, recipe, context.seed)
            if dedicated_servers() and not self._elastic:  # other servers fail together with their worker
                self.roll_call = session_calls(transport.rank, transport.world, self._silent)
        except BaseException:  # otherwise a server without workers would remain
            self._close()
            raise
        self.step = self._steps_made  # for a worker that returns, the step that the servers know
        self._in_flight: RunningScript | None = None
        self._served_bytes = self._endpoints.bytes_served()

    def _check(self, loop: LoopState, optimizer: Optimizer | None, rank: int) -> None:
        """Raise AttachError for a loop or an optimizer that servers do not support."""
        _refuse(loop)
        if optimizer is None:
            raise AttachError(
                "servers make the optimizer's step, so they need its rule. Pass one of torch's optimizers to the "
                "session of arrays: engine.Session(..., server_optimizer=lambda tensors: torch.optim.SGD(tensors, "
                "lr=0.1))."
            )
        if optimizer.state and rank == 0:
            events.notice(
                "the optimizer has state already, such as momenta, but servers create a new optimizer without it. "
                "Attach before the first step, or write EveryStep()"
            )

    def _make_client(self, optimizer: Optimizer | None, recipe: Recipe, **options: Any) -> Client:
        if optimizer is None:  # refused before
            raise AttachError("servers need the rule of an optimizer. Pass one to attach.")
        return Client(self._rank, self._world, self._parameters, optimizer, recipe, **options)

    @property
    def _steps_made(self) -> int:
        """Number of optimizer steps of this worker, as far as the client knows."""
        return self._client.step

    def _begin(self, optimizer: Optimizer | None, recipe: Recipe, seed: int) -> Client:
        """Send the parameters to the servers, or adopt theirs."""
        client = self._make_client(
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
        """Workers that the first server considers lost; empty if it does not answer."""
        try:
            silent: Collection[int] = run_peer_script(self._client.silent(), self._endpoints.me)
        except PeerLost:
            return ()
        return silent

    def merge(self) -> Mapping[str, Tensor]:
        """The current parameters of the servers, uncompressed."""
        self._apply_pull()
        exact: dict[str, Tensor] = run_peer_script(self._client.exact(), self._endpoints.me)
        return exact

    # -- around the optimizer ------------------------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        if closure:
            raise LoopError(
                "with parameter servers the servers make the optimizer's step, from one gradient, but a closure "
                "computes gradients within the step. Call backward(), then optimizer.step() without a closure."
            )
        self._wait()
        self._client.gather(
            {name: parameter.grad for name, parameter in self._parameters.items()}, self.controls.weight
        )
        for parameter in self._parameters.values():
            parameter.grad = None
        self._client.apply_pull()  # of the previous step; only this thread writes parameters
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

    def _settle(self) -> None:
        """Complete what is in flight. All workers call it together."""
        self._apply_pull()

    def _adopt_servers(self) -> None:
        """Continue from the servers' restored parameters, which were pulled."""
        self._client.apply_pull()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def end_epoch(self) -> int:
        """Rounds do not wait for a worker without data; all workers start the next epoch together."""
        self._apply_pull()
        if self._synchronous:
            run_peer_script(self._client.barrier(), self._endpoints.me)
            self._client.apply_pull()
        return 0

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        """Wait until no worker pushes, and fetch server state; the servers are divided among the workers."""
        self._settle()
        self._all_gather_text(f"{self.step}")
        self._servers_saved = {
            number: run_peer_script(self._client.server_state(number), self._endpoints.me) for number in self._share
        }
        self._saved_at = self.step

    @property
    def _share(self) -> range:
        """Numbers of the servers with state that this worker saves."""
        return range(self._rank, len(self._client.shard_clients), self._world)

    def flush(self) -> None:
        raise LoopError(
            "the servers hold these parameters in the shapes they had at attach. Call session.close() and "
            "gossamer.attach(...) again."
        )

    def end_run(self) -> None:
        """Wait until all workers are done, and adopt their common parameters."""
        self.end_calls()
        totals = self._end()
        self._client.apply_final()
        if totals.missed:
            events.notice(
                f"worker {self._rank} was disconnected when the others ended, so its later steps were not used; "
                "it adopts the parameters that they ended with"
            )
        counts = events.ContributionsCounted(
            applied=totals.applied, late=totals.late, staleness=totals.staleness, samples=totals.samples
        )
        events.emit(counts)
        self._endpoints.drain(len(self._client.shard_clients))

    def _end(self) -> RunTotals:
        """Leave the servers, and wait until all workers have."""
        self._apply_pull()
        totals: RunTotals = run_peer_script(self._client.end(), self._endpoints.me)
        return totals

    def close(self) -> None:
        self.end_calls()
        self._close()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """Include the state of the servers that `meet_to_save` fetched at this step."""
        found = {"step": self.step, "world": self._world, "client": self._client.state_dict()}
        if self._saved_at == self.step:
            found["servers"] = self._servers_saved
        return found

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the state of all servers. Called on every worker, while none pushes."""
        problem = self._misfit(progress)
        self._settle()
        name = self._all_gather_text(secrets.token_hex(8))[0]
        if not problem:
            try:
                for number, state in progress["servers"].items():
                    run_peer_script(self._client.restore_server(number, state, name), self._endpoints.me)
            except CheckpointError as error:
                problem = str(error)
        lost = [f"rank {who}: {text}" for who, text in enumerate(self._all_gather_text(problem)) if text]
        if lost:
            raise CheckpointError(f"the state of the servers was not restored: {'; '.join(lost)}")
        self._client.load_state_dict(progress["client"])
        run_peer_script(self._client.begin(), self._endpoints.me)
        self._adopt_servers()
        self.step, self._saved_at = self._steps_made, -1
        self._all_gather_text("")  # no worker pushes before all have joined

    def _misfit(self, progress: Mapping[str, Any]) -> str:
        """Why the servers cannot continue from this state, or ""."""
        if progress.get("world") != self._world:
            return (
                f"{progress.get('world')} workers saved it, but this run has {self._world}: servers store the steps of "
                "each worker. Run the same number of workers"
            )
        if "servers" not in progress:
            return (
                "it lacks the state of the servers, which session.save() writes and session.state_dict() alone does "
                "not contain. Write session.save(directory) and session.load(directory)"
            )
        if set(progress["servers"]) != set(self._share):
            return f"it has the state of servers {sorted(progress['servers'])}, expected {list(self._share)}"
        return ""


def _refuse_large(parameters: Mapping[str, Tensor], shard_clients: Sequence[ShardClient], part_bytes: int) -> None:
    """Raise AttachError if a server's shard does not fit into one message. Pull compression widens half precision."""
    largest = max(
        sum(block.flat.nbytes for block in blocks)
        for each in shard_clients
        for blocks in (each.gradients, each.replica.values)
    )
    if largest <= part_bytes:
        return
    narrowest = min(value.flat.element_size() for each in shard_clients for value in each.replica.values)
    itemsizes = {name: max(parameter.element_size(), narrowest) for name, parameter in parameters.items()}
    servers = servers_for(
        Layout.of({name: tuple(each.shape) for name, each in parameters.items()}), part_bytes, itemsizes
    )
    if servers is None:
        raise AttachError(
            f"one row of a tensor is larger than {part_bytes:,} bytes, the limit of a message to a server, and rows "
            "are not divided. Write EveryStep()."
        )
    raise AttachError(
        f"one server's part of this model has {largest:,} bytes, but a message has at most {part_bytes:,}. Start "
        f"more servers, so that each holds less: gossamer run --servers {servers} (with no smaller shards= in the "
        "recipe)."
    )


def _refuse(loop: LoopState) -> None:
    """Raise AttachError for hooks around the optimizer's step, which the servers make."""
    if loop.scale() is not None:
        raise AttachError(
            "a GradScaler needs the optimizer's step on the worker, but parameter servers make it. Train in bfloat16, "
            "which needs no scaler, or write EveryStep()."
        )
    if loop.clips:
        raise AttachError(
            "clip_norm clips the mean gradient, which only parameter servers compute. Clip each worker's own gradient "
            "between backward() and step(): torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
        )
