"""Communication: transports that execute collective operations or carry messages, and the job that they run in.

process_group  over torch.distributed: Gloo on CPUs, NCCL on GPUs
communicator   operations of a GPU engine (NCCL) in flight: completed on the device, or aborted
device_wait    waits for work that never completes if a peer is lost, and detects the loss
mesh/          over its own TCP connections and shared memory, with compiled loops, in addition to a process group
elastic/       meshes with changing members, one per view
simulated      inside one process, a thread per worker; no sockets
throttled      over another transport, as slowly as a given network
echo_transport  immediate results for this rank's operations, to measure the computation between them
detached       of a worker outside of its group: rejects every operation

rpc/           endpoints of asynchronous peers: push, pull, reply over TCP
rpc_protocol/  the protocol of rpc: frames, messages, credentials, without sockets
staging/       transfer of device tensors through host memory, chunk by chunk
packing        payloads to and from one buffer of bytes

bandwidth/     limits of this machine, shared by all of its processes
handshake      mutual challenge-response over a token, with which every authenticated connection begins
tls_contexts   TLS contexts from a folder of certificates
libcrypto      the OpenSSL of Python's ssl: encryption of one message, and functions for the compiled loops
runtime/       the communication thread, its pipeline and transactions
environment/   the job of this process: rendezvous, run token, network interfaces
membership/    the members of an elastic run: views, the coordinator, its journal
network/       links between workers, and in `cost` the time that messages take on them
simulation/    peers in virtual time, over links that lose, repeat and delay messages
"""
