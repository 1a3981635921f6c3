"""JAX adapter: trains pytrees of arrays. `gossamer.jax` is its public module.

session    a session of pytrees, used between two jitted functions
leaves     pytrees of (sharded) arrays as named tensors and back
slices     several slices of processes: which ranks hold the same shards
optimizer  an optax transformation that averages gradients within jit
"""

from gossamer.integrations.library_versions import require_library

require_library("jax", "0.7", extra="jax")
require_library("optax", "0.2.4", extra="jax")
