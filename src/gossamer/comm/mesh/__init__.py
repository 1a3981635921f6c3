"""The mesh: every worker connected to every other, collectives by tables of hops, compiled loops that run them.

transport            MeshTransport: what the loops serve by them, the rest by a fallback (the process group)
standalone           such a transport without a process group: texts travel over the mesh, too
encrypted            such a transport over sealed connections: with --tls nothing of the group goes elsewhere
operations           each operation as a program for the loops
staged_operations    each operation of tensors on devices, in chunks, by way of this machine's memory
device_transport     by the engine or by the mesh, where all have a GPU
engine_selector      which of the two takes an operation
program              what one rank does, message by message, for an operation
native_mesh          the compiled loops over all connections: begin, wait, make progress, close
last_words           what a rank that hangs up tells the others: who is gone
connect              connections between all ranks of a process group, authenticated
greeter              one listening socket: greets all members of a meeting, and drops strangers
sealing              keys of encrypted connections, agreed inside TLS; libcrypto for the loops
shared_memory        memory between two workers of one machine
link_measurement     round trips, rates and losses between ranks, measured as the group begins
bandwidth_probe      which pairs send to each other to find each host's rates
link_statistics      the kernel's counters of all connections by peer, for observers
tcp_info             the kernel's statistics of a connection
collective_selector  which collective a mean takes
collective_preference  asks a transport for another one from now on
stall_watchdog       notices and timeouts while connected peers are silent
"""
