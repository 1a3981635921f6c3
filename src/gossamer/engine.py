"""Arrays: train under any recipe without a torch model, as from JAX, TensorFlow or numpy. See docs/how-to/arrays.md."""

from importlib import import_module

from gossamer.train.session.arrays import ArraySession as Session
from gossamer.train.session.arrays import estimate

__all__ = ["Session", "estimate"]

import_module("gossamer.observe.reporter").register()  # as gossamer.attach does: sessions are reported
