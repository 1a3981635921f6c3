"""JAX optimizer: an optax transformation that averages gradients with the other workers, within jit and scan."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax import tree_util
from jax.experimental import io_callback

from gossamer.algorithms.strategies import GradientStage
from gossamer.base.transport import Transport
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import AttachError, LoopError, MismatchError
from gossamer.integrations.jax.session import PytreeSession
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.session_status import SessionStats


class _Averaging:
    """Averages gradients by a session, then calls an optax transformation."""

    def __init__(self, inner: Any, open_session: Callable[[Any], PytreeSession]) -> None:
        self._inner, self._open_session = optax.with_extra_args_support(inner), open_session
        self.session: PytreeSession | None = None  # from `init(parameters)` on

    def init(self, parameters: Any) -> Any:
        leaves = tree_util.tree_leaves(parameters)
        if not any(isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in leaves):
            self._open(parameters)  # jax.eval_shape passes shapes only; they open no session
        return self._inner.init(parameters)

    def _open(self, parameters: Any) -> None:
        if self.session is not None:
            raise LoopError(
                "this optimizer was initialized before, and its session is open. Call optimizer.close() on every rank, "
                "or construct another by gossamer.jax.optimizer(...)."
            )
        for path, leaf in tree_util.tree_flatten_with_path(parameters)[0]:
            if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
                raise AttachError(
                    f'"{tree_util.keystr(path)}" is on {len(leaf.sharding.device_set)} devices, but a callback '
                    "within jit has one. Use gossamer.jax.Session(parameters, recipe) between two jitted functions."
                )
        if is_elastic():
            raise AttachError(
                "this is an elastic run, but a jitted scan makes a fixed number of steps with its parameters: a new "
                "worker would have other parameters. Use gossamer.jax.Session(parameters, recipe, "
                "state=lambda: moments) between two jitted functions, or run a fixed number: gossamer run --workers 4."
            )
        session = self._open_session(parameters)
        if not all(isinstance(stage, GradientStage) for stage in session.recipe.strategy.stages):
            session.close()
            raise AttachError(
                f"{session.recipe!r} changes parameters, and an optimizer within jit returns updates of them alone. "
                "Use gossamer.jax.Session(parameters, recipe) between two jitted functions, or a recipe that averages "
                'gradients in every step, such as "TopK(0.01)".'
            )
        _refuse_unlike(session, parameters)
        self.session = session

    def update(self, gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise LoopError(
                "update() was called without the parameters, which ranks compare. Write "
                "optimizer.update(gradients, state, parameters)."
            )
        if self.session is None:
            raise LoopError(
                "update() was called before init(parameters), which opens the session. Call optimizer.init(parameters) "
                "outside of jit, as TrainState.create does."
            )
        mean, made = self._mean(gradients, params)

        def step() -> Any:
            return self._inner.update(mean, state, params, **extra)

        def no_step() -> Any:
            updates, kept = jax.eval_shape(step)
            zeros = tree_util.tree_map(lambda each: jnp.zeros(each.shape, each.dtype), updates)
            return zeros, tree_util.tree_map(lambda each, like: jnp.asarray(each, like.dtype), state, kept)

        return jax.lax.cond(made, step, no_step)

    def _mean(self, gradients: Any, parameters: Any) -> tuple[Any, Any]:
        """The mean of the gradients, and whether to make a step. Runs in an ordered callback."""
        sent, held = _HostArguments(gradients), _HostArguments(parameters)

        def exchange(gradients: list[Any], parameters: list[Any]) -> tuple[list[Any], Any]:
            mean, made = self._exchange(sent.tree(gradients), held.tree(parameters))
            return _HostArguments(mean).arrays, made

        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in sent.arrays]
        expected = (shapes, jax.ShapeDtypeStruct((), bool))
        mean, made = io_callback(exchange, expected, sent.arrays, held.arrays, ordered=True)
        return sent.tree(mean), made

    def _exchange(self, gradients: Any, parameters: Any) -> tuple[Any, Any]:
        assert self.session is not None
        mean = self.session.give(gradients, on_host=True)
        self.session.took_step(parameters)  # those before the step: ranks in lock step have them alike
        return gradients if mean is None else mean, np.array(mean is not None)


class DistributedTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optax transformation, (init, update), with the session that averages its gradients.

    JAX takes it apart and builds it again where it is an argument of a compiled function, so it has these two parts
    alone: they are methods of the object that holds the session.
    """

    @property
    def _averaging(self) -> _Averaging:
        found: _Averaging = self.init.__self__
        return found

    @property
    def session(self) -> PytreeSession | None:
        """The open session, from `init(parameters)` until `close()`."""
        return self._averaging.session

    def _settled(self) -> PytreeSession:
        jax.effects_barrier()
        if self.session is None:
            raise LoopError("the optimizer has no session yet. Call optimizer.init(parameters) outside of jit first.")
        return self.session

    @property
    def stats(self) -> SessionStats:
        """Bytes and seconds of the steps so far. Waits for dispatched steps."""
        return self._settled().stats

    def log(self, **metrics: float) -> None:
        """Write numbers into the run's record: optimizer.log(loss=0.3)."""
        self._settled().log(**metrics)

    def state_dict(self) -> dict[str, Any]:
        """The recipe's state. Waits for dispatched steps. Save it with the TrainState, on every rank."""
        return self._settled().state_dict()

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Resume from `state_dict`. Parameters and moments come from the TrainState that was saved with it."""
        self._settled().load_state_dict(*states)

    def close(self) -> None:
        """Close the session after all dispatched steps. All ranks call it."""
        try:
            jax.effects_barrier()
        finally:  # only now: steps that were dispatched use the session
            session, self._averaging.session = self.session, None
            if session is not None:
                session.close()


def optimizer(
    inner: Any, recipe: Written = None, *, transport: Transport | None = None, **options: Any
) -> DistributedTransformation:
    """An optax transformation that averages gradients with the other workers, then applies `inner`.

    It works within jit and lax.scan, by an ordered callback to the host, for recipes that average gradients in every
    step. All ranks begin with equal parameters: initialize them with one key.

    Args:
        inner: the optimizer of the averaged gradients.
        recipe, transport, options: as for gossamer.jax.Session.

    Returns:
        The transformation. Call its close() after training.

    Example:
        tx = gossamer.jax.optimizer(optax.adamw(1e-3), "TopK(0.01)")
        state = TrainState.create(apply_fn=model.apply, params=parameters, tx=tx)
    """
    averaging = _Averaging(inner, partial(PytreeSession, recipe=recipe, transport=transport, **options))
    made: DistributedTransformation = DistributedTransformation(averaging.init, averaging.update)
    return made


class _HostArguments:
    """The arrays of a tree, which a compiled program may pass to the host. The tree may have other leaves, such as the
    functions of an Equinox module and float0, the gradient of integers."""

    def __init__(self, tree: Any) -> None:
        leaves, self._form = tree_util.tree_flatten(tree)
        self._places = [place for place, leaf in enumerate(leaves) if _is_host_argument(leaf)]
        self.arrays = [leaves[place] for place in self._places]
        self._other = [None if _is_host_argument(leaf) else leaf for leaf in leaves]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays in the place of its own."""
        leaves = [*self._other]
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        return tree_util.tree_unflatten(self._form, leaves)


def _is_host_argument(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and leaf.dtype != jax.dtypes.float0


def _bytes(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def _refuse_unlike(session: PytreeSession, parameters: Any) -> None:
    """Raise MismatchError on all ranks if the parameters of a rank differ from those of rank 0."""
    firsts = session.parameters
    own, _ = tree_util.tree_flatten_with_path(parameters)
    pairs = zip(own, tree_util.tree_leaves(firsts), strict=True)
    unlike = [tree_util.keystr(path) for (path, local), first in pairs if _bytes(local) != _bytes(first)]
    every = [json.loads(text) for text in session.arrays.all_gather_text(json.dumps(unlike))]
    if any(every):
        session.close()
        which = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(every) if names)
        raise MismatchError(
            f"parameters are not those of rank 0, and an optimizer cannot replace them: {which}. Initialize them "
            "with the same key on every rank, as model.init(jax.random.key(0), inputs)."
        )
