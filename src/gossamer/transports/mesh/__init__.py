"""The mesh: every worker connected to every other, collectives by tables of hops, compiled loops that run them.

transport            MeshTransport: each operation as a program for the loops; GPUs and texts by the process group
program              what one rank does, message by message, for an operation
native_mesh          the compiled loops over all connections: begin, wait, make progress, close
connect              connections between all ranks, authenticated
shared_memory        memory between two workers of one machine
link_measurement     round trips, rates and losses between ranks, measured as the group begins
bandwidth_probe      which pairs send to each other to find each host's rates
tcp_info             the kernel's statistics of a connection
collective_selector  which collective a mean takes
stall_watchdog       notices and timeouts while connected peers are silent
"""
