"""Communication: transports that answer collective operations or carry messages, and the job that they run in.

process_group  over torch.distributed: Gloo on processors, NCCL on GPUs
communicator   what an engine between devices has under way: finished there, or aborted
peer_watch     waits for what is never done once a peer is gone, and notices that one is
mesh/          over TCP connections and shared memory of its own, with compiled loops, beside a process group
elastic/       meshes whose members come and go, one for each view
simulated      inside one process, a thread per worker; no sockets
throttled      over another transport, as slowly as a given network would answer
replay         answers at once what this rank sends, and times the computing between
detached       of a worker whose group has gone on without it: refuses every operation

rpc/           endpoints of peers that do not move in step: push, pull, reply over TCP
wire/          the protocol of rpc: frames, messages, authentication, without sockets
staging/       tensors of devices on their way to and from this machine's memory, chunk by chunk
packing        payloads as one buffer of bytes, and back

handshake      mutual challenge-response over a token, with which every authenticated connection begins
runtime/       the communication thread, its pipeline and transactions
environment/   the job that this process was started in: rendezvous, run token, network interfaces
membership/    the members of an elastic run: views, the coordinator, its journal
network/       links between workers, and in `cost` the time that messages take on them
simulation/    peers in virtual time, over links that lose, repeat and delay messages
"""
