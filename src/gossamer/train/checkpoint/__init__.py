"""Checkpoints: hold one safetensors file per rank, written atomically, without pickle.

    agreement.py    what one rank cannot do is given up on all
    background.py   one rank's part, written beside training
    coordinated.py  save and load on all ranks: a step counts once every rank has written its part
    dcp.py          torch's own format, both ways: the one module here that knows torch.distributed
    disk_space.py   what may be removed where the disk is full
    fsync.py        writes, folders and moves that are on disk when the call returns
    files.py        one rank's part on disk: staged, completed, pruned, read back and verified
    listing.py      what a directory holds, and what of it is complete
    nothing_found.py  what a path holds that has no checkpoint
    pytree.py       a tree of plain values and tensors as JSON and named tensors
    replicas.py     copies of parts on other machines, and how they come back
    reshard.py      a checkpoint of another world size, or of other wrappers in the recipe
    runs.py         a directory belongs to one run: steps of another are set aside
    snapshot.py     a tree's copy in memory that is used again
    state.py        the protocol Stateful, random generators, checkpoint keys, a tree's form

    DIRECTORY/step-00000020/rank-0.safetensors      a rank's tensors and tree
    DIRECTORY/step-00000020/rank-0.json             its manifest; without it the step does not count
    DIRECTORY/replaced/step-00000020/               a step that is being written anew, as it was

`stage` writes the first under a temporary name. Once every rank has done so, `complete` renames it and writes the
second. Only agreement.py, coordinated.py and replicas.py communicate.
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
