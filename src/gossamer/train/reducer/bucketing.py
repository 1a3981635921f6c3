"""Bucketing: which parameters share a bucket, and which a fragment."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import Parameter

from gossamer.errors import AttachError

BUCKET_BYTES = 25 * 2**20


def assign_buckets(parameters: Mapping[str, Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[dict[str, Parameter]]:
    """Which parameters share a bucket: in reverse order, since gradients appear roughly from the last to the first.

    A bucket holds one device and dtype and ends when it reaches `bucket_bytes`; larger tensors are not split.
    """
    done: list[dict[str, Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], dict[str, Parameter]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kind = (parameter.device, parameter.dtype)
        bucket = filling.setdefault(kind, {})
        bucket[name] = parameter
        if sum(p.nbytes for p in bucket.values()) >= bucket_bytes:
            done.append(filling.pop(kind))
    return done + list(filling.values())


def assign_fragments(parameters: Mapping[str, Parameter], count: int) -> list[dict[str, Parameter]]:
    """So many parts of about equal bytes: from the largest tensor on, each goes to the smallest part so far.

    In the parameters' own order within each part. Raises AttachError where there are fewer tensors than parts.
    """
    if len(parameters) < count:
        raise AttachError(
            f"{len(parameters)} tensors do not make {count} fragments, and a turn without any would be for nothing: "
            f"write fragments={len(parameters)} at most."
        )
    places: dict[str, int] = {}
    filled = [0] * count
    for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].nbytes):
        place = filled.index(min(filled))
        places[name] = place
        filled[place] += parameter.nbytes
    return [{name: p for name, p in parameters.items() if places[name] == place} for place in range(count)]
