"""Startup checks: compares fingerprints of all ranks before the first step, and hands out rank 0's parameters."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.base import rng, system
from gossamer.base.kernels.checks import crc32
from gossamer.errors import MismatchError
from gossamer.events import notice
from gossamer.train.checkpoint.pytree import flat_bytes
from gossamer.train.engine.step_decision import by_value
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.sharding.local_shards import local_part, local_parts
from gossamer.version import __version__

HOST, FRAMEWORK, DATA = "host", "framework", "data"  # sent in addition; only DATA is compared, for a notice
MEANING = {
    "gossamer": "Gossamer's version (install the same one everywhere)",
    "torch": "torch's version (install the same one everywhere)",
    "python": "Python's version (use the same one everywhere)",
    "byte order": "the order of bytes in numbers (use machines of one kind: numbers travel as they lie in memory)",
    "nccl": "NCCL's version (install the same one everywhere)",
    "script": "a hash of the script (copy the same file everywhere)",
    "recipe": "the recipe (pass the same one everywhere)",
    "layout": "a hash of the parameters' names, shapes and dtypes (build the same model everywhere)",
    "options": "other arguments of attach (pass the same everywhere)",
    "state": "a hash of the names, shapes and dtypes in state= (give the same arrays everywhere)",
    "optimizer": "a hash of the optimizer's state and settings (load its state on every rank, before attach)",
}


def check_ranks_alike(
    model: nn.Module, optimizer: Optimizer, group: GroupCalls, data: Sequence[str], **about: str
) -> bool:
    """Compare the fingerprints of all ranks, then give them rank 0's parameters and buffers.

    Args:
        data: a text for each of the world's shards, equal on ranks with the same data.
        about: see fingerprint.

    Returns whether ranks use different frameworks, with optimizers that are not known here.
    """
    here = {HOST: socket.gethostname(), FRAMEWORK: f"torch {torch.__version__}", DATA: json.dumps([*data])}
    texts = group.all_gather_text(json.dumps({**fingerprint(optimizer=optimizer, **about), **here}))
    mixed = compare(texts)
    if group.transport.rank == 0:
        report_other_data([json.loads(json.loads(text).get(DATA, "[]")) for text in texts])
    hand_out([*model.parameters(), *model.buffers()], group.all_gather_text, group.broadcast_)
    return mixed


def fingerprint(*, recipe: str, layout: str, optimizer: Optimizer | None, options: str = "") -> dict[str, str]:
    """Versions, script, recipe, layout, options and optimizer, which must be alike on every rank."""
    return {
        "gossamer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "byte order": sys.byteorder,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
        "script": _script_hash(),
        "recipe": recipe,
        "layout": layout,
        "options": options,
        "optimizer": "none" if optimizer is None else optimizer_digest(optimizer),
    }


def compare(texts: Sequence[str]) -> bool:
    """Refuse fingerprints (as JSON, by rank) that differ, naming each value and the ranks that hold it. Returns whether
    they are of several frameworks, each of which steps by an optimizer of its own."""
    prints: list[Mapping[str, str]] = [json.loads(text) for text in texts]
    kinds = [each.get(FRAMEWORK, "") for each in prints]
    mixed = len({kind.split(" ")[0] for kind in kinds}) > 1  # versions of one framework are compared
    ignored = {HOST, FRAMEWORK, DATA, *(["optimizer"] if mixed else [])}
    differing = [key for key in prints[0] if key not in ignored and len({each.get(key) for each in prints}) > 1]
    if differing:
        hosts = [each.get(HOST, "") for each in prints]
        machines = f". Their machines are {by_value(hosts)}" if len({*hosts}) > 1 else ""
        if mixed:
            machines += (
                f". Their frameworks are {by_value(kinds)}, which train together where parameters have the same names, "
                "shapes, dtypes and order"
            )
        lines = [
            f"{MEANING.get(key, key)}: {by_value([each.get(key, 'none') for each in prints])}" for key in differing
        ]
        raise MismatchError(
            "the ranks are not alike, so their parameters would drift apart without a word. They differ in "
            + "; in ".join(lines)
            + machines
        )
    return mixed


def report_other_data(by_rank: Sequence[Sequence[str]]) -> None:
    """Print a notice if ranks divide different data. by_rank: a text for each shard. Ranks with another number of
    shards, such as one of its own for validation on one rank, are not compared."""
    if len({len(each) for each in by_rank}) > 1:
        return
    for number, texts in enumerate(zip(*by_rank, strict=True), start=1):
        if len({*texts}) > 1:
            notice(
                f"the ranks divide different data in world.shard(...) number {number}: {by_value(texts)}. Every rank "
                "takes its part of its own data, so samples are used twice, and held-out samples may be trained on. "
                "Load and split the data equally on every rank, such as torch.utils.data.random_split(dataset, "
                "lengths, generator=torch.Generator().manual_seed(0))."
            )


def hand_out(
    tensors: Sequence[Tensor],
    all_gather_text: Callable[[str], list[str]],
    broadcast: Callable[[Sequence[Tensor], int], None],
) -> None:
    """Broadcast rank 0's values of the tensors that differ between ranks. all_gather_text: all-gathers a text.

    Hashes are compared first: a script that seeds every rank alike, or loads one file, has nothing to send.
    """
    own = local_parts(tensors)
    forms, *hashes = zip(*(text.split() for text in all_gather_text(_described(own))), strict=False)
    if len({*forms}) > 1:
        raise MismatchError(
            "the ranks' models have different buffers or frozen parameters: their number, shapes or dtypes differ, so "
            "rank 0's cannot be broadcast. Build the same model everywhere, including buffers, before attach."
        )
    unlike = [_once(tensor) for tensor, by_rank in zip(own, hashes, strict=True) if len({*by_rank}) > 1]
    if unlike:
        broadcast(unlike, 0)


def _described(tensors: Sequence[Tensor]) -> str:
    """A hash of all shapes and dtypes, then one of each tensor's values."""
    form = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    return " ".join([f"{rng.address(form):x}", *tensor_hashes(tensors)])


def _once(tensor: Tensor) -> Tensor:
    """Without the repetitions of `expand`, which cannot be written to."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _script_hash() -> str:
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if script is None or not script.is_file():
        return "none"
    return hashlib.blake2b(script.read_bytes(), digest_size=8).hexdigest()


ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of a function or an object; it differs between processes


def optimizer_digest(optimizer: Optimizer) -> str:
    """A hash of every tensor and number in the optimizer's state."""
    state = optimizer.state_dict()
    tensors: list[Tensor] = []
    numbers: list[str] = []
    for path, value in _leaves(state, ""):
        if isinstance(value, Tensor):
            tensors.append(local_part(value))
            numbers.append(f"{path}:{tuple(value.shape)}")
        else:
            numbers.append(f"{path}={ADDRESS.sub('', repr(value))}")
    return hashlib.blake2b(";".join([*tensor_hashes(tensors), *numbers]).encode(), digest_size=8).hexdigest()


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{path}.{place}")
    else:
        yield path, tree


# -- hashes of tensors, on all cores and near the speed of memory ------------------------------------------------------

CHUNK_BYTES = 2**22
HASH_BYTES = 8
MOST_THREADS = 8  # as many as memory can feed


def tensor_hashes(tensors: Iterable[Tensor], threads: int | None = None) -> list[str]:
    """A hash of each tensor's elements in row-major order; one in 2^32 unlike tensors, at most, has an equal one.

    h(x) = blake2b(size, crc(chunk 1), crc(chunk 2), ...)    chunks of 4 MiB, each a CRC-32
    law: the same with any number of threads; tensors that differ in up to 32 neighboring bits have unlike hashes

    threads: None for as many as there are cores, at most 8.
    """
    listed = [flat_bytes(tensor) for tensor in tensors]
    pieces = (chunk for flat in listed for chunk in flat.split(CHUNK_BYTES))
    wanted = min(_cores(), MOST_THREADS) if threads is None else threads
    few = wanted == 1 or sum(len(flat) for flat in listed) <= CHUNK_BYTES
    with nullcontext() if few else ThreadPoolExecutor(wanted, "gossamer-hash") as pool:
        checksums: Iterator[int] = iter((map if pool is None else pool.map)(_checksum, pieces))
        return [_joined(len(flat), list(islice(checksums, -(-len(flat) // CHUNK_BYTES) or 1))) for flat in listed]


def _checksum(chunk: Tensor) -> int:
    numbers: Any = chunk.cpu().numpy()
    return crc32(memoryview(numbers))


def _joined(nbytes: int, checksums: Sequence[int]) -> str:
    running = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=HASH_BYTES)
    for checksum in checksums:
        running.update(checksum.to_bytes(4, "little"))
    return running.hexdigest()


def _cores() -> int:
    return system.cores()
