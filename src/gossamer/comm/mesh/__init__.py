"""The mesh: a fully connected set of TCP connections between workers, on which compiled loops run the collectives.

transport            MeshTransport: operations that the compiled loops support; a fallback for others
standalone           MeshTransport without a process group: the mesh also carries texts
encrypted            MeshTransport with encrypted connections: with --tls, all traffic of the group uses them
operations           each operation as a program for the compiled loops
staged_operations    operations on device tensors, copied in chunks through host memory
device_transport     chooses between engine and mesh in groups with GPUs only
engine_selector      the rule for that choice
program              one rank's part of an operation, message by message
native_mesh          the compiled loops over all connections: begin, wait, make progress, close
last_words           last message of a rank that disconnects: the rank that caused the failure
connect              authenticated connections between all ranks of a process group
greeter              connects all members of a meeting by listening sockets, and drops strangers
connection_candidates  which connections two members open to each other, and which one they use
key_exchange         keys of sealed connections without certificates
sealing              keys of encrypted connections, agreed inside TLS
shared_memory        shared memory between two workers on one machine
link_measurement     round trips, bandwidths and losses between ranks, measured when the group is formed
bandwidth_probe      which pairs exchange data to determine each host's bandwidth
long_links           congestion control, and socket buffers for a large bandwidth-delay product
link_statistics      the kernel's counters of all connections by peer, for observers
tcp_info             the kernel's statistics of a connection
collective_selector  which all-reduce algorithm a mean uses; changes it during training
stall_watchdog       notices and timeouts while connected peers are silent
"""
