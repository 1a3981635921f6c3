"""Remote service: the owner's side of one remote module: held graphs, gradients of each client, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.compressors import Dense
from gossamer.base.kernels.threads import count_of_caller
from gossamer.base.layout import dtype_of
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Receipt
from gossamer.errors import LoopError, MalformedError, MismatchError, PeerLost
from gossamer.train.parallel.remote_codec import TensorCoder
from gossamer.train.parallel.remote_messages import (
    AnyRequest,
    Backward,
    Describe,
    FetchState,
    Forward,
    OptimizerStep,
    Returned,
    ZeroGrad,
    encode,
    flatten,
    unflatten,
)

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class ServedCall:
    """One request of a client, and the destination of its answer."""

    client: int
    number: int  # of the client's calls
    request: AnyRequest
    payload: Payload
    reply: Callable[[Receipt], None]

    def returned(self, answer: Returned, payload: Payload = ()) -> None:
        self.reply(Receipt(version=0, payload=payload, about=encode(answer)))

    def failed(self, error: Exception) -> None:
        self.returned(Returned(error=type(error).__name__, message=str(error)))


@dataclass(frozen=True)
class HeldGraph:
    """The graph of a forward pass, kept for its backward pass."""

    inputs: Sequence[Tensor]  # leaves
    outputs: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Arguments of `remote` on every rank, which the owner compares."""

    layer: int
    clients: tuple[int, ...]
    coder: TensorCoder
    most_held: int

    @property
    def text(self) -> str:
        return f"codec={self.coder.compressor!r}, clients={list(self.clients)}, held={self.most_held}"


class RemoteService:
    """Serves one module, one call after the other, on its own thread, which alone uses the module.

    A module's forward may call modules of other ranks and wait for them, since their services are other threads.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, settings: ServiceSettings) -> None:
        self.module = module
        self._optimizer, self._settings, self._coder = optimizer, settings, settings.coder
        first = next(module.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._held: dict[int, dict[int, HeldGraph]] = {}  # by client, and number of the call
        self._gradients: dict[int, Gradients] = {}  # by client
        self._stepping: dict[int, tuple[ServedCall, OptimizerStep]] = {}  # clients that wait for the others
        self._lost: set[int] = set()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread_count = count_of_caller()

    # -- called on any thread --------------------------------------------------------------------------

    def submit(self, call: ServedCall) -> None:
        self._work.put(partial(self._serve, call))

    def client_left(self, client: int) -> None:
        self._work.put(partial(self._forget, client))

    def stop(self) -> None:
        self._work.put(None)

    def run(self) -> None:
        while (work := self._work.get()) is not None:
            self._thread_count.adopt()
            work()

    # -- the service's thread ----------------------------------------------------------------------------

    def _serve(self, call: ServedCall) -> None:
        try:
            match call.request:
                case Forward() as request:
                    self._forward(call, request)
                case Backward() as request:
                    self._backward(call, request)
                case OptimizerStep() as request:
                    self._step(call, request)
                case ZeroGrad():
                    alone = self._settings.clients == (call.client,)
                    for client in list(self._gradients) if alone else [call.client]:
                        self._gradients.pop(client, None)
                    call.returned(Returned())
                case Describe(settings=text):
                    self._compare(call, text)
                    sizes = {name: each.numel() for name, each in self.module.named_parameters()}
                    call.returned(Returned(tree=flatten(sizes, [])))
                case FetchState():
                    tensors: list[Tensor] = []
                    tree = flatten(dict(self.module.state_dict()), tensors)
                    copies = [tensor.detach().cpu().clone() for tensor in tensors]
                    records, payload = replace(self._coder, compressor=Dense()).encode(copies, ())
                    call.returned(Returned(tree=tree, tensors=records), payload)
                case request:
                    raise MalformedError(f"a module has no request {type(request).__name__}")
        except Exception as error:  # including errors of the module, which the client receives
            call.failed(error)

    def _compare(self, call: ServedCall, remote: str) -> None:
        if remote != self._settings.text:
            raise MismatchError(
                f"rank {call.client} called remote(...) with {remote}, but the owner with {self._settings.text}. Make "
                "the same calls, in the same order, on all ranks."
            )

    def _forward(self, call: ServedCall, request: Forward) -> None:
        held = self._held.setdefault(call.client, {})
        for number in request.dropped:
            held.pop(number, None)
        if request.hold and len(held) >= self._settings.most_held:
            raise LoopError(
                f"{len(held)} forward passes of rank {call.client} wait for their backward pass, and each holds its "
                "activations here. Evaluate within torch.no_grad(), free outputs without a backward pass, or "
                f"write remote(..., held={2 * self._settings.most_held})."
            )
        inputs = _present(self._coder.decode(request.tensors, call.payload, (call.client, call.number, "forward")))
        for tensor, record in zip(inputs, request.tensors, strict=True):
            tensor.requires_grad_(request.hold and record.needs_gradient)
        used = [tensor.to(self._device, copy=tensor.requires_grad) for tensor in inputs]  # in-place: not on leaves
        args, kwargs = unflatten(request.tree, used)
        if self.module.training != request.training:
            self.module.train(request.training)
        outputs: list[Tensor] = []
        with torch.set_grad_enabled(request.hold), self._autocast(request.autocast):
            tree = flatten(self.module(*args, **kwargs), outputs)
            outputs = [output.cpu() for output in outputs]
        if any(output.requires_grad for output in outputs):
            held[call.number] = HeldGraph(inputs, outputs)
        # Copies, since sent tensors must not change, and outputs may be parameters or inputs of the module.
        self._return(call, tree, [output.detach().clone() for output in outputs], [o.requires_grad for o in outputs])

    def _autocast(self, lower: str) -> AbstractContextManager[Any]:
        """The client's torch.autocast on this device. lower: the name of its type, or "" for none."""
        return torch.autocast(self._device.type, dtype_of(lower)) if lower else nullcontext()

    def _backward(self, call: ServedCall, request: Backward) -> None:
        graph = self._held.get(call.client, {}).pop(request.of, None)
        if graph is None:
            raise LoopError(
                "the graph of this forward pass was freed: remote modules support neither a second backward pass nor "
                "retain_graph=True. Add the losses, or call the module once more."
            )
        address = (call.client, call.number, "backward")
        gradients = self._coder.decode(request.tensors, call.payload, address)
        if len(gradients) != len(graph.outputs):
            raise MalformedError(f"received {len(gradients)} gradients for {len(graph.outputs)} outputs")
        due = [
            (output, gradient)
            for output, gradient in zip(graph.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        with self._collecting(call.client):
            torch.autograd.backward([output for output, _ in due], [gradient for _, gradient in due])
        self._return(call, None, [each.grad for each in graph.inputs])

    @contextmanager
    def _collecting(self, client: int) -> Iterator[None]:
        """Context manager in which .grad holds the sum of this client's backward passes."""
        own = self._gradients.setdefault(client, {})
        for name, parameter in self.module.named_parameters():
            parameter.grad = own.pop(name, None)
        try:
            yield
        finally:
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    own[name], parameter.grad = parameter.grad, None

    def _return(
        self, call: ServedCall, tree: object, tensors: Sequence[Tensor | None], needs: Sequence[bool] = ()
    ) -> None:
        records, payload = self._coder.encode(tensors, (call.client, call.number, "answer"), needs)
        call.returned(Returned(tree=tree, tensors=records), payload)

    # -- the optimizer -------------------------------------------------------------------------------------

    def _step(self, call: ServedCall, request: OptimizerStep) -> None:
        clients = self._settings.clients
        if self._optimizer is None:
            raise LoopError(
                "this module's owner has no optimizer. Write remote(..., optimizer=lambda parameters: "
                "torch.optim.AdamW(parameters, lr=1e-3)) on every rank."
            )
        if call.client not in clients:
            raise LoopError(
                f"rank {call.client} called step(), but the clients of this module are {list(clients)}. "
                f"Write remote(..., clients={sorted((*clients, call.client))}) on every rank."
            )
        self._refuse_lost()
        self._stepping[call.client] = call, request
        if set(self._stepping) == set(clients):
            waiting, self._stepping = self._stepping, {}
            self._finish([waiting[client] for client in clients])

    def _finish(self, waiting: Sequence[tuple[ServedCall, OptimizerStep]]) -> None:
        """Step with the sum of all gradients, in rank order, over the number of clients; answer all of them."""
        try:
            self._apply([request.settings for _, request in waiting])
        except Exception as error:
            for call, _ in waiting:
                call.failed(error)
        else:
            for call, _ in waiting:
                call.returned(Returned())

    def _apply(self, settings: Sequence[Mapping[str, float]]) -> None:
        optimizer = cast(Optimizer, self._optimizer)
        if any(each != settings[0] for each in settings):
            raise MismatchError(
                f"clients {list(self._settings.clients)} step with different settings, "
                f"{[dict(each) for each in settings]}. Step their schedulers equally."
            )
        for group in optimizer.param_groups:
            unknown = set(settings[0]) - set(group)
            if unknown:
                raise LoopError(f"{type(optimizer).__name__} has no setting {sorted(unknown)}: it has {sorted(group)}")
            group.update(settings[0])
        by_rank = [gradients for _, gradients in sorted(self._gradients.items())]
        for name, parameter in self.module.named_parameters():
            parts = [gradients[name] for gradients in by_rank if name in gradients]
            if parts:
                parameter.grad = sum(parts[1:], parts[0]) / len(self._settings.clients)
        optimizer.step()
        optimizer.zero_grad()
        self._gradients.clear()

    def _forget(self, client: int) -> None:
        """Free the data of a rank that left, and do not wait for it."""
        self._held.pop(client, None)
        self._gradients.pop(client, None)
        self._stepping.pop(client, None)
        self._lost |= {client} & set(self._settings.clients)
        try:
            self._refuse_lost()
        except PeerLost as error:
            waiting, self._stepping = self._stepping, {}
            for call, _ in waiting.values():
                call.failed(error)

    def _refuse_lost(self) -> None:
        if self._lost:
            raise PeerLost(
                f"rank {min(self._lost)} is one of this module's clients {list(self._settings.clients)} and has left, "
                "so no step can include all of them. Restart the run from the parameters that the owners have saved."
            )


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    if any(tensor is None for tensor in tensors):
        raise MalformedError("a forward pass lacks some of its tensors")
    return [tensor for tensor in tensors if tensor is not None]
