"""Checkpoints: one safetensors file per rank, written atomically, without pickle.

    coordinated.py  save and load on all ranks: a step counts once every rank has written its part
    files.py        one rank's part on disk: staged, completed, pruned, read back and verified
    pytree.py       a tree of plain values and tensors as JSON and named tensors
    reshard.py      a checkpoint of another world size, or of other wrappers in the recipe
    runs.py         a directory belongs to one run: steps of another are set aside
    state.py        the protocol Stateful, random generators, checkpoint keys, a tree's form

    DIRECTORY/step-00000020/rank-0.safetensors      a rank's tensors and tree
    DIRECTORY/step-00000020/rank-0.json             its manifest; without it the step does not count

`stage` writes the first under a temporary name. Once every rank has done so, `complete` renames it and writes the
second. Only coordinated.py communicates.
"""

from gossamer.checkpoint.files import abandon, complete, complete_steps, read, stage, writers
from gossamer.checkpoint.pytree import digest, flatten, unflatten

__all__ = ["abandon", "complete", "complete_steps", "digest", "flatten", "read", "stage", "unflatten", "writers"]
