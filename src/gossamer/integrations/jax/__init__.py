"""JAX adapter: trains pytrees of arrays. `gossamer.jax` is its public door.

session    a session of pytrees, used between two jitted functions
leaves     pytrees of (sharded) arrays as named tensors and back
slices     several slices of processes: which ranks hold the same shards
optimizer  an optax transformation that averages gradients within jit
"""
