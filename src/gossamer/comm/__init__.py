"""Communication: transports that execute collective operations or carry messages, and the job that they run in.

process_group  over torch.distributed: Gloo on CPUs, NCCL on GPUs
communicator   operations of a GPU engine (NCCL) in flight: completed on the device, or aborted
peer_watch     waits for work that never completes if a peer is lost, and detects the loss
mesh/          over its own TCP connections and shared memory, with compiled loops, in addition to a process group
elastic/       meshes with changing members, one per view
simulated      inside one process, a thread per worker; no sockets
throttled      over another transport, as slowly as a given network
replay         immediate results for this rank's operations, to measure the computation between them
detached       of a worker outside of its group: rejects every operation

rpc/           endpoints of asynchronous peers: push, pull, reply over TCP
wire/          the protocol of rpc: frames, messages, authentication, without sockets
staging/       transfer of device tensors through host memory, chunk by chunk
packing        payloads to and from one buffer of bytes

handshake      mutual challenge-response over a token, with which every authenticated connection begins
runtime/       the communication thread, its pipeline and transactions
environment/   the job of this process: rendezvous, run token, network interfaces
membership/    the members of an elastic run: views, the coordinator, its journal
network/       links between workers, and in `cost` the time that messages take on them
simulation/    peers in virtual time, over links that lose, repeat and delay messages
"""
