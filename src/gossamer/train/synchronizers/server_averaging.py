"""Server averaging: local training, with changes of parameters that parameter servers merge in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.peer_ops import PeerScript
from gossamer.comm.runtime.peer_thread import RunningScript, run_peer_script
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.errors import AttachError, LoopError
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.step_decision import Presence
from gossamer.train.parameter_server.client.client import RunTotals, StepResult
from gossamer.train.parameter_server.client.periodic_client import PeriodicClient
from gossamer.train.parameter_server.shard_spec import ELASTIC
from gossamer.train.synchronizers.local_step_counter import LocalStepCounter
from gossamer.train.synchronizers.parameter_server import ServerSynchronizer


class ServerAveraging(ServerSynchronizer):
    """Trains locally, and exchanges changes of parameters with servers in the background (AsyncDiLoCo).

    The training thread waits for servers at saves and at the end of the run only. Between two steps it adopts the
    answers that have arrived, and starts the exchanges that are due. Buffers such as BatchNorm's statistics stay local.
    """

    _client: PeriodicClient

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._exchanges: dict[int, RunningScript] = {}  # messages and the waits for their merges, by server
        self._unreceived: set[int] = set()  # servers that have not received the message of their exchange
        self._received = threading.Condition()
        self._samples = 0.0  # of the current step
        self._local = LocalStepCounter(self.controls, self._loop, self._rank, self._buckets, self._count)

    def _check(self, loop: LoopState, optimizer: Optimizer | None, rank: int) -> None:
        if loop.scale() is not None:
            raise AttachError(
                "a GradScaler skips the same steps on all workers, but here each worker makes its own steps. Train in "
                "bfloat16, which needs no scaler, or write DiLoCo(period=24)."
            )

    def _make_client(self, optimizer: Optimizer | None, recipe: Recipe, **options: Any) -> PeriodicClient:
        world = ELASTIC if self._elastic else self._world
        return PeriodicClient(self._number, world, self._parameters, recipe, **options)

    @property
    def _steps_made(self) -> int:
        return self._client.local_steps

    def merge(self) -> Mapping[str, Tensor]:
        """The current parameters of the servers, uncompressed. They change while other workers train."""
        exact: dict[str, Tensor] = run_peer_script(self._client.exact(), self._endpoints.me)
        return exact

    # -- local steps ---------------------------------------------------------------------------------------------------

    @property
    def between_steps(self) -> bool:
        return self._local.between_steps

    def _count(self) -> None:
        self._samples = self._local.take_weight()
        self._local.drop_nonfinite()

    def before_step(self, *, closure: bool) -> None:
        self._local.before_step(closure=closure)

    def after_step(self) -> None:
        self._local.after_step()
        self.step += 1
        self._client.count(self._samples)
        if landed := [number for number, each in self._exchanges.items() if each.landed()]:
            with self._loop.copies.following(self._parameters.values()):
                for number in landed:
                    self._take_up(number)
        for number in self._client.due():
            self._start(number)
        served = self._endpoints.bytes_served()
        self._local.add(False, {"bytes_sent": served - self._served_bytes})
        self._served_bytes = served
        self._local.report()
        if self.asked_to_stop and not self._client.stopping:
            run_peer_script(self._client.stop(), self._endpoints.me)
        self.stopping = self._client.stopping

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        self._unreceived.add(number)
        script = self._noting(self._client.exchange(number, partial(self._note_receipt, number)), number)
        self._exchanges[number] = self._endpoints.me.start(script)

    def _noting(self, script: PeerScript, number: int) -> PeerScript:
        try:
            return (yield from script)
        finally:
            self._note_receipt(number)

    def _note_receipt(self, number: int) -> None:
        """A server has received the message of its exchange, or the exchange has failed."""
        with self._received:
            self._unreceived.discard(number)
            self._received.notify_all()

    def _take_up(self, number: int) -> None:
        """Wait for an exchange, and adopt its result."""
        began = time.perf_counter()
        result: StepResult = self._exchanges.pop(number).wait()
        self._client.take_up(number)
        self._loop.judged("exchange", None if result.finite else (self._rank, "parameters"))
        self._local.add(
            False,
            {
                "encode_seconds": result.encode_seconds,
                "wire_seconds": result.wire_seconds,
                "decode_seconds": result.decode_seconds + time.perf_counter() - began,
                "bytes_sent": result.bytes_sent,
                "bytes_pulled": result.bytes_received,
            },
        )

    # -- all workers together ------------------------------------------------------------------------------------------

    def end_epoch(self) -> int:
        """No worker waits for another one between epochs."""
        return 0

    def _settle(self) -> None:
        """Let the servers merge all that was sent, and adopt it. Local changes that were not sent yet remain."""
        self._wait_for_receipts()
        run_peer_script(self._client.settle(), self._endpoints.me)
        with self._loop.copies.following(self._parameters.values()):
            for number in list(self._exchanges):
                self._take_up(number)
            run_peer_script(self._client.pull(), self._endpoints.me)
            for number in range(len(self._client.shard_clients)):
                self._client.take_up(number)
        self._all_gather_text("")  # no worker sends before all have adopted the same parameters

    def _adopt_servers(self) -> None:
        self._client.keep_changes()

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        if self._elastic:
            raise LoopError(
                "an elastic run with servers has no checkpoint of all workers, since they come and go without waiting "
                "for each other; its servers keep a journal. To save the common model, write: with "
                "session.averaged_parameters(model): torch.save(model.state_dict(), FILE)"
            )
        super().meet_to_save(call)

    def leave(self) -> None:
        """Send what was not sent, unless a step is half made, and leave the servers without waiting for merges."""
        self._wait_for_receipts()
        if self.between_steps:
            run_peer_script(self._client.send_rest(), self._endpoints.me)
        run_peer_script(self._client.leave(), self._endpoints.me)

    def _wait_for_receipts(self) -> None:
        """Afterwards, messages that leave the servers do not overtake those of exchanges."""
        with self._received:
            current_worker().wait_for(self._received, lambda: not self._unreceived)

    def _end(self) -> RunTotals:
        self._wait_for_receipts()
        run_peer_script(self._client.send_rest(), self._endpoints.me)
        totals: RunTotals = run_peer_script(self._client.end(), self._endpoints.me)
        for each in self._exchanges.values():  # merged by now
            each.wait()
        self._exchanges.clear()
        return totals

    def close(self) -> None:
        self._local.close()
        super().close()
