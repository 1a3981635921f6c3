"""Whether numbers can be added up, in one pass at the speed of memory; what is not served goes to plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.errors import NotFinite
from gossamer.kernels import checks
from gossamer.kernels.native import documented, serves
from gossamer.kernels.native_quantise import magnitudes


@documented(checks.within_range)
def within_range(x: Tensor, terms: int) -> bool:
    if not serves(x, types=(torch.float32,)):
        return checks.within_range(x, terms)
    try:
        return bool(magnitudes(x.view(-1), [x.numel()]) <= torch.finfo(x.dtype).max / terms)
    except NotFinite:
        return False
