"""JAX adapter: trains pytrees of arrays. `gossamer.jax` is its public module.

session    a session of pytrees, used between two jitted functions; slices of processes: ranks that hold the same shards
leaves     pytrees of (sharded) arrays as named tensors and back
optimizer  an optax transformation that averages gradients within jit
"""

from gossamer.integrations.library_versions import require_library

require_library("jax", "0.7", extra="jax")
require_library("optax", "0.2.4", extra="jax")
