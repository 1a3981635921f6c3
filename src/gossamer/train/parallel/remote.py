"""Remote modules: a layer on another rank, called like a local one, with autograd and optional compression."""

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
from gossamer.base.layout import dtype_name
from gossamer.comm.environment.run_settings import LARGEST_FRAME_BYTES
from gossamer.errors import LoopError, MismatchError
from gossamer.train.parallel.remote_codec import TensorCoder, codec_of
from gossamer.train.parallel.remote_hub import RemoteHub, current_hub
from gossamer.train.parallel.remote_messages import (
    AutocastType,
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
    """Place a module on one rank, its owner, and call it from any rank. Collective, in the same order on every rank.

    The owner keeps the graph of a forward pass until its backward pass, or until the client has freed the outputs;
    within torch.no_grad() it keeps nothing. Random numbers, for example of dropout, are drawn on the owner. Within
    torch.autocast the owner computes in the same type.

    Args:
        module: used on the owner only; other ranks may pass None. Its inputs and outputs are tensors, numbers, text,
            True, False and None in lists, tuples and dicts. Nothing is pickled: named tuples keep their names, and
            other subclasses arrive as list, tuple or dict.
        rank: of the owner.
        optimizer: makes the owner's optimizer from the module's parameters.
        codec: stateless compressor of floating-point tensors in both directions, as in a recipe, such as "Int8()".
        clients: ranks that must all call step() for a step; None means all except the owner.
        held: maximum number of forward passes per rank that wait for their backward pass.

    Returns:
        The module to call, the same on every rank.

    Raises:
        MismatchError: ranks pass different arguments.
        RecipeError: the codec needs a group or keeps state.
        LoopError: in a simulated or elastic run.
        RemoteError: in calls: an error raised on the owner.
        PeerLost: in calls: the owner has left, or has not answered within GOSSAMER_TIMEOUT.

    Example:
        layer = remote(nn.Linear(64, 10) if world.rank == 1 else None, rank=1, optimizer=torch.optim.SGD)
        loss = layer(x).sum()  # sends x to rank 1, returns the output
        loss.backward()  # sends its gradient to rank 1, returns x.grad
        layer.optimizer.step()  # rank 1 steps its own optimizer
        layer.serve()  # on rank 1: until the scripts of all other ranks have ended

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
    """`remote` over an existing hub."""
    ranks = range(hub.world)
    if rank >= hub.world:
        raise ValueError(
            f"rank={rank} needs at least {rank + 1} workers, and this job has {hub.world}. Start it with: gossamer run "
            f"--workers {rank + 1} SCRIPT"
        )
    among = tuple(each for each in ranks if each != rank or hub.world == 1) if clients is None else tuple(clients)
    if rank not in ranks or not among or sorted(set(among)) != list(among) or not set(among) <= set(ranks) or held < 1:
        raise ValueError(
            f"rank={rank}, clients={clients}, held={held}: ranks are 0 to {hub.world - 1}, clients are some of "
            "them in ascending order, and held must be at least 1."
        )
    if (module is None or next(module.parameters(), None) is None) and hub.rank == rank and optimizer is not None:
        raise ValueError(
            f"rank {rank} owns this module and passed {'None' if module is None else 'one without parameters'}, so "
            "optimizer= has no parameters. Write remote(nn.Linear(...), ...) there, or leave out optimizer=."
        )
    if module is None and hub.rank == rank:
        raise ValueError(
            f"rank {rank} owns this module and passed None. Write remote(nn.Linear(...), rank={rank}) there."
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
    """Proxy of a module on another rank; made by `remote`. It has no parameters here.

    Attributes:
        owner: the rank with the parameters.
        local_module: the module itself on the owner, else None. Only its service may run it; read or save it after
            `serve` has returned.
        optimizer: the RemoteOptimizer of the owner's parameters.
        bytes_sent, bytes_received: of tensors, by calls of this rank.
        parameter_sizes: number of elements by parameter name.
    """

    def __init__(self, hub: RemoteHub, owner: int, settings: ServiceSettings, local_module: nn.Module | None) -> None:
        super().__init__()
        self.owner, self.optimizer = owner, RemoteOptimizer(self)
        self.bytes_sent = self.bytes_received = 0  # of tensors, by calls of this rank
        self._hub, self._settings, self._coder = hub, settings, settings.coder
        self._name = f"remote module {settings.layer}"
        self._local = (local_module,)  # a tuple hides it from parameters(), which are then the same on every rank
        self.dropped: deque[int] = deque()  # calls with freed graphs, reported to the owner in the next call
        self._anchor = torch.zeros((), requires_grad=True)  # so that the owner's parameters always get gradients
        sizes: dict[str, int] = self._described()
        self.parameter_sizes = sizes  # number of elements by name

    @property
    def local_module(self) -> nn.Module | None:
        return self._local[0]

    def extra_repr(self) -> str:
        return f"rank={self.owner}, codec={self._coder.compressor!r}, parameters={sum(self.parameter_sizes.values())}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the owner's module(*args, **kwargs)."""
        tensors: list[Tensor] = []
        tree = flatten((args, kwargs), tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        lower = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        autocast = cast(AutocastType, "" if lower is None else dtype_name(lower))
        call = _RemoteCall(self, tree, hold=torch.is_grad_enabled(), autocast=autocast)
        # Copies between devices are outside of the function: its backward pass, which waits for another rank, then
        # runs on the thread that called backward(), and no device's thread waits.
        outputs = _RemoteFunction.apply(call, self._anchor, *[tensor.cpu() for tensor in tensors])  # type: ignore[no-untyped-call]
        return unflatten(call.tree, [output.to(device) for output in outputs])

    def remote_state_dict(self) -> dict[str, Tensor]:
        """The owner's module.state_dict(), uncompressed, on the CPU."""
        _, answer, tensors = self.ask(FetchState())
        return cast(dict[str, Tensor], unflatten(answer.tree, cast(list[Tensor], tensors)))

    def serve(self) -> None:
        """Serve on an owner until the scripts of all ranks have ended or called `serve`. Announces this rank's end.

        Without it an owner serves at the end of its script. Raises PeerLost if a rank has left without notice.
        """
        self._hub.end()

    def ask(
        self, request: Request | Callable[[int], tuple[Request, tuple[Tensor, ...]]]
    ) -> tuple[int, Returned, list[Tensor | None]]:
        """Send a request. Returns (number of the call, the owner's answer, its tensors).

        request: the request, or a function that makes it from the number of the call.
        """
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
        with suppress(IndexError):  # garbage collection may run on any thread
            while True:
                taken.append(self.dropped.popleft())
        return taken

    def _described(self) -> dict[str, int]:
        _, answer, _ = self.ask(Describe(settings=self._settings.text))
        found = unflatten(answer.tree, [])
        if not isinstance(found, dict):
            raise MismatchError(
                f"rank {self.owner} sent an invalid description of {self._name}. Install the same version of Gossamer "
                "on every rank."
            )
        return cast(dict[str, int], found)

    def __getstate__(self) -> Any:
        raise LoopError(
            f"{self._name} uses this run's connections and can be neither copied nor pickled. Save the result of "
            "remote_state_dict()."
        )


class RemoteOptimizer:
    """The owner's optimizer, stepped by a module's clients: `layer.optimizer` of a RemoteModule.

    Args:
        layer: the RemoteModule whose owner holds the optimizer.

    Example:
        loss.backward()
        layer.optimizer.step(lr=0.01)
    """

    def __init__(self, layer: RemoteModule) -> None:
        self._layer = layer

    def step(self, **settings: float) -> None:
        """Wait until all clients have called it; the owner then makes one step and clears the gradients.

            gradient = (sum of the gradients of all backward passes of all ranks) / (number of clients)

        Args:
            settings: values for all of the optimizer's parameter groups, such as lr=0.01; equal on all clients.
        """
        try:
            numbers = {name: float(value) for name, value in settings.items()}
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"step() sends settings as numbers, but received {settings} ({error}). Write step(lr=0.01), and give "
                "all others to the owner's optimizer: remote(..., optimizer=lambda parameters: "
                "torch.optim.AdamW(parameters, betas=(0.9, 0.95)))."
            ) from None
        self._layer.ask(OptimizerStep(settings=numbers))

    def zero_grad(self) -> None:
        """Clear the gradients of this rank's backward passes since the last step; with one client, of all ranks."""
        self._layer.ask(ZeroGrad())


class _RemoteCall:
    """One forward call, and after it its number and the tree of its outputs."""

    def __init__(self, layer: RemoteModule, tree: Any, hold: bool, autocast: AutocastType) -> None:
        self.layer, self.tree, self.hold, self.autocast, self.number = layer, tree, hold, autocast, -1

    def forward(self, inputs: Sequence[Tensor], needs: Sequence[bool]) -> tuple[list[Tensor], Sequence[TensorRecord]]:
        layer = self.layer
        dropped = layer.take_dropped()

        def request(number: int) -> tuple[Request, tuple[Tensor, ...]]:
            records, payload = layer._coder.encode(inputs, (layer._hub.rank, number, "forward"), needs)
            made = Forward(
                tree=self.tree,
                tensors=records,
                training=layer.training,
                autocast=self.autocast,
                hold=self.hold,
                dropped=tuple(dropped),
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
        received, records = call.forward([each.detach() for each in inputs], ctx.needs_input_grad[2:])
        outputs = tuple(each.clone() for each in received)  # torch refuses in-place operations on views of a message
        ctx.mark_non_differentiable(
            *[output for output, record in zip(outputs, records, strict=True) if not record.needs_gradient]
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, *ctx.call.backward(gradients)
