"""JAX: train pytrees under any recipe, or average gradients within jit. See docs/how-to/integrations/jax.md."""

from importlib import import_module

from gossamer.integrations.jax.optimizer import optimizer
from gossamer.integrations.jax.session import PytreeSession as Session

__all__ = ["Session", "optimizer"]

import_module("gossamer.observe.reporter").register()  # as gossamer.attach does: sessions are reported
