"""Checkpoints: one safetensors file per rank, written atomically, without pickle.

    agreement.py    an action that fails on one rank is abandoned on all ranks
    background.py   writes one rank's part during training
    coordinated.py  save and load on all ranks: a step is complete once every rank has written its part
    dcp.py          conversion from and to torch's format; the only module here that uses torch.distributed
    fsync.py        writes, folders and moves that are durable when the call returns
    files.py        one rank's part on disk: staged, completed, pruned, read and verified
    listing.py      the checkpoints in a directory, and whether they are complete
    pytree.py       a tree of plain values and tensors as JSON and named tensors
    replicas.py     copies of parts on other machines
    reshard.py      a checkpoint of another world size, or of other wrappers in the recipe
    runs.py         a directory belongs to one run: steps of another run are moved aside
    snapshot.py     a copy of a tree in reused memory
    state.py        the protocol Stateful, random generators, checkpoint keys, the form of a tree

    DIRECTORY/step-00000020/rank-0.safetensors      a rank's tensors and tree
    DIRECTORY/step-00000020/rank-0.json             its manifest; without it the step does not count
    DIRECTORY/replaced/step-00000020/               the old version of a step that is being replaced

`stage` writes the first file under a temporary name. After every rank has done so, `complete` renames it and writes the
second. Only agreement.py, coordinated.py, replicas.py and runs.py communicate.
"""

from gossamer.train.checkpoint.files import (
    REPLACED,
    abandon,
    complete,
    complete_steps,
    keep_replaced,
    prune,
    read,
    stage,
    stage_pieces,
    writers,
)
from gossamer.train.checkpoint.pytree import digest, flatten, unflatten

__all__ = [
    "REPLACED",
    "abandon",
    "complete",
    "complete_steps",
    "digest",
    "flatten",
    "keep_replaced",
    "prune",
    "read",
    "stage",
    "stage_pieces",
    "unflatten",
    "writers",
]
