"""Checkpoints: one safetensors file a rank, written atomically, no pickle.

    DIRECTORY/step-00000020/rank-0.safetensors      everything this rank holds
    DIRECTORY/step-00000020/rank-0.json             the manifest; without it the step does not count

`stage` writes the first under a temporary name. Once every rank has done so, `complete` names it and writes the
second. Nothing here communicates: whoever saves gathers the digests in between.
"""

from gossamer.checkpoint.files import abandon, complete, complete_steps, read, stage, writers
from gossamer.checkpoint.pytree import digest, flatten, unflatten

__all__ = ["abandon", "complete", "complete_steps", "digest", "flatten", "read", "stage", "unflatten", "writers"]
