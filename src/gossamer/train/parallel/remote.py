"""Remote modules: a layer on another rank, called as if it were here; autograd goes through it, compressed or not."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors import Compressor
from gossamer.comm.environment.run_settings import LARGEST_FRAME_BYTES
from gossamer.errors import LoopError, MismatchError
from gossamer.train.parallel.remote_codec import TensorCoder, codec_of
from gossamer.train.parallel.remote_hub import RemoteHub
from gossamer.train.parallel.remote_messages import (
    Backward,
    Describe,
    FetchState,
    Forward,
    OptimizerStep,
    Request,
    Returned,
    TensorRecord,
    ZeroGrad,
    decode_returned,
    flatten,
    unflatten,
)
from gossamer.train.parallel.remote_run import current_hub
from gossamer.train.parallel.remote_service import RemoteService, ServiceSettings

MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]


def remote(
    module: nn.Module | None,
    rank: int,
    *,
    optimizer: MakeOptimizer | None = None,
    codec: str | Compressor = "Dense()",
    clients: Sequence[int] | None = None,
    held: int = 64,
) -> RemoteModule:
    """Place a module on one rank, its owner, and call it from any. Every rank makes the same calls in the same order.

        layer = remote(nn.Linear(64, 10) if world.rank == 1 else None, rank=1, optimizer=torch.optim.SGD)
        loss = layer(x).sum()        # x travels to rank 1, the output comes back
        loss.backward()              # its gradient travels there, and x.grad comes back
        layer.optimizer.step()       # rank 1 steps its own optimizer
        layer.serve()                # on rank 1: until all other ranks' scripts have ended

    module: used on the owner only; others may give None. What it is given and returns are tensors, numbers, text, True,
    False and None in lists, tuples and dicts. Nothing is pickled.
    optimizer: makes the owner's optimizer from the module's parameters.
    codec: compresses floating-point tensors both ways, as in a recipe, such as "Int8()"; without memory of the last.
    clients: the ranks whose step() makes a step together; None: all but the owner.
    held: the most forward passes of one rank that may wait for their backward pass.

    The owner keeps the graph of a forward pass until its backward pass has come, or the client has let go of the
    outputs; within torch.no_grad() it keeps nothing. Randomness such as dropout's is the owner's.

    Raises MismatchError where ranks give other arguments, RecipeError for a codec that needs a group or remembers,
    and LoopError in a simulated or elastic run. Calls raise RemoteError with what the owner raised, and PeerLost where
    it has left or has not answered within GOSSAMER_TIMEOUT.

    source: Gupta & Raskar 2018, J. Netw. Comput. Appl. (split learning); torch.distributed.rpc (distributed autograd)
    """
    return place_remotely(current_hub(), module, rank, optimizer=optimizer, codec=codec, clients=clients, held=held)


def place_remotely(
    hub: RemoteHub,
    module: nn.Module | None,
    rank: int,
    *,
    optimizer: MakeOptimizer | None = None,
    codec: str | Compressor = "Dense()",
    clients: Sequence[int] | None = None,
    held: int = 64,
) -> RemoteModule:
    """`remote`, over a hub that is there."""
    ranks = range(hub.world)
    among = tuple(each for each in ranks if each != rank or hub.world == 1) if clients is None else tuple(clients)
    if rank not in ranks or not among or sorted(set(among)) != list(among) or not set(among) <= set(ranks) or held < 1:
        raise ValueError(
            f"rank={rank}, clients={clients}, held={held}: there are ranks 0 to {hub.world - 1}, clients are some of "
            "them in ascending order, and at least one graph is held."
        )
    if (module is None or next(module.parameters(), None) is None) and hub.rank == rank and optimizer is not None:
        raise ValueError(
            f"rank {rank} owns this module and gave {'none' if module is None else 'one without parameters'}, so "
            "optimizer= has nothing to step. Write remote(nn.Linear(...), ...) there, or leave out optimizer=."
        )
    if module is None and hub.rank == rank:
        raise ValueError(
            f"rank {rank} owns this module and gave None. Write remote(nn.Linear(...), rank={rank}) there."
        )
    layer = hub.next_layer(rank)
    settings = ServiceSettings(
        layer=layer, clients=among, coder=TensorCoder(codec_of(codec), layer, LARGEST_FRAME_BYTES), most_held=held
    )
    if module is not None and hub.rank == rank:
        made = None if optimizer is None else optimizer(module.parameters())
        hub.serve(layer, RemoteService(module, made, settings))
    return RemoteModule(hub, rank, settings, module if hub.rank == rank else None)


class RemoteModule(nn.Module):
    """Stands for a module on another rank; made by `remote`. It has no parameters here.

    owner: the rank that has them. local_module: the module itself, on the owner; else None. Only its service may run
    it, and `serve` has ended before it is read or saved.
    """

    def __init__(self, hub: RemoteHub, owner: int, settings: ServiceSettings, local_module: nn.Module | None) -> None:
        super().__init__()
        self.owner, self.optimizer = owner, RemoteOptimizer(self)
        self.bytes_sent = self.bytes_received = 0  # of tensors, by calls of this rank
        self._hub, self._settings, self._coder = hub, settings, settings.coder
        self._name = f"remote module {settings.layer}"
        self._local = (local_module,)  # a tuple hides it from parameters(), which are then the same on every rank
        self.dropped: deque[int] = deque()  # calls whose graphs nobody needs; the owner is told with the next one
        self._anchor = torch.zeros((), requires_grad=True)  # so that the owner's parameters get gradients in any case
        sizes: dict[str, int] = self._described()
        self.parameter_sizes = sizes  # numbers of elements, by name

    @property
    def local_module(self) -> nn.Module | None:
        return self._local[0]

    def extra_repr(self) -> str:
        return f"rank={self.owner}, codec={self._coder.compressor!r}, parameters={sum(self.parameter_sizes.values())}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's module(*args, **kwargs)."""
        tensors: list[Tensor] = []
        tree = flatten((args, kwargs), tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        call = _RemoteCall(self, tree, hold=torch.is_grad_enabled())
        # Transfers between devices lie outside of the function: its backward pass, which waits for another rank, then
        # runs in the thread that called backward(), and no device's thread waits with it.
        outputs = _RemoteFunction.apply(call, self._anchor, *[tensor.cpu() for tensor in tensors])  # type: ignore[no-untyped-call]
        return unflatten(call.tree, [output.to(device) for output in outputs])

    def remote_state_dict(self) -> dict[str, Tensor]:
        """The owner's module.state_dict(), uncompressed, on the CPU."""
        _, answer, tensors = self.ask(FetchState())
        return cast(dict[str, Tensor], unflatten(answer.tree, cast(list[Tensor], tensors)))

    def serve(self) -> None:
        """On an owner: serve until all ranks' scripts have ended or called `serve`, which it says of its own, too.

        Without it an owner serves at the end of its script. Raises PeerLost where one has left without a word.
        """
        self._hub.end()

    def ask(
        self, request: Request | Callable[[int], tuple[Request, tuple[Tensor, ...]]]
    ) -> tuple[int, Returned, list[Tensor | None]]:
        """(number of the call, the owner's answer, its tensors). request: or what makes it, from the call's number."""
        with self._hub.numbered() as number:
            made, payload = (request, ()) if isinstance(request, Request) else request(number)
            receipt = self._hub.call(self.owner, self._settings.layer, number, made, payload)
        answer = decode_returned(receipt.about, self.owner, self._name)
        self.bytes_sent += sum(tensor.nbytes for tensor in payload)
        self.bytes_received += sum(tensor.nbytes for tensor in receipt.payload)
        address = (self._hub.rank, number, "answer")
        return number, answer, self._coder.decode(answer.tensors, receipt.payload, address)

    def take_dropped(self) -> list[int]:
        taken = list[int]()
        with suppress(IndexError):  # garbage is collected in any thread
            while True:
                taken.append(self.dropped.popleft())
        return taken

    def _described(self) -> dict[str, int]:
        _, answer, _ = self.ask(Describe(settings=self._settings.text))
        found = unflatten(answer.tree, [])
        if not isinstance(found, dict):
            raise MismatchError(f"rank {self.owner} does not describe {self._name}, so it has another version of it")
        return cast(dict[str, int], found)

    def __getstate__(self) -> Any:
        raise LoopError(
            f"{self._name} belongs to this run's connections and can neither be copied nor pickled. Save what "
            "remote_state_dict() returns."
        )


class RemoteOptimizer:
    """The owner's optimizer, stepped by a module's clients."""

    def __init__(self, layer: RemoteModule) -> None:
        self._layer = layer

    def step(self, **settings: float) -> None:
        """Wait until all clients call it; then the owner makes one step, and gradients are zero again.

            gradient = (sum of the gradients of all backward passes of all ranks) / (number of clients)

        settings: set in all of the optimizer's parameter groups before, such as lr=0.01; alike on all clients.
        """
        self._layer.ask(OptimizerStep(settings=settings))

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's backward passes since the last step; an only client, all ranks'."""
        self._layer.ask(ZeroGrad())


class _RemoteCall:
    """One forward call and, once it is made, its number and the tree of its outputs."""

    def __init__(self, layer: RemoteModule, tree: Any, hold: bool) -> None:
        self.layer, self.tree, self.hold, self.number = layer, tree, hold, -1

    def forward(self, inputs: Sequence[Tensor], needs: Sequence[bool]) -> tuple[list[Tensor], Sequence[TensorRecord]]:
        layer = self.layer
        dropped = layer.take_dropped()

        def request(number: int) -> tuple[Request, tuple[Tensor, ...]]:
            records, payload = layer._coder.encode(inputs, (layer._hub.rank, number, "forward"), needs)
            made = Forward(
                tree=self.tree, tensors=records, training=layer.training, hold=self.hold, dropped=tuple(dropped)
            )
            return made, payload

        try:
            self.number, answer, outputs = layer.ask(request)
        except BaseException:
            layer.dropped.extend(dropped)
            raise
        self.tree = answer.tree
        if any(record.needs_gradient for record in answer.tensors):
            self._release = weakref.finalize(self, layer.dropped.append, self.number)
            self._release.atexit = False
        return cast(list[Tensor], outputs), answer.tensors

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        layer = self.layer

        def request(number: int) -> tuple[Request, tuple[Tensor, ...]]:
            records, payload = layer._coder.encode(gradients, (layer._hub.rank, number, "backward"))
            return Backward(of=self.number, tensors=records), payload

        found = layer.ask(request)[2]
        self._release.detach()
        return found


class _RemoteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _RemoteCall, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        outputs, records = call.forward([each.detach() for each in inputs], ctx.needs_input_grad[2:])
        ctx.mark_non_differentiable(
            *[output for output, record in zip(outputs, records, strict=True) if not record.needs_gradient]
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, *ctx.call.backward(gradients)
