"""Range checks in one pass at the speed of memory; what is not served goes to plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.errors import NotFinite
from gossamer.kernels.library import documented, serves
from gossamer.kernels.quantize import magnitudes
from gossamer.kernels.reference import finite


@documented(finite.within_range)
def within_range(x: Tensor, terms: int) -> bool:
    if not serves(x, types=(torch.float32,)):
        return finite.within_range(x, terms)
    try:
        return bool(magnitudes(x.view(-1), [x.numel()]) <= torch.finfo(x.dtype).max / terms)
    except NotFinite:
        return False
