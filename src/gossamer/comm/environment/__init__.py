"""Environment: rank and world size of this process, rendezvous with the other ranks, and settings from the launcher.

launcher_env.py        rank and world size from the variables of torchrun, mpirun or srun, or from TF_CONFIG
rendezvous.py          forms the process group once all ranks are present and reachable
wait_timeout.py        timeout of waits for other ranks, by argument or variable; wait_progress.py: notices during them
interruptible_call.py  runs a blocking torch call in a thread, so that Ctrl-C and lost ranks interrupt it
meeting.py             rendezvous protocol: ranks authenticate, exchange texts, and learn which ranks have left
meeting_server.py      thread in rank 0 that serves the meeting; meeting_member.py: each rank's connection to it
meeting_place.py       address of the meeting, torch's store for the process group; cause and remedy of a failed meeting
listening.py           a listening socket at one address of this machine; which other workers can be dialed
network_interfaces.py  IPv4 interfaces, and the choice of the one towards the other workers
tcp_store.py           torch's key-value store, with any build of torch
store.py               a key-value store at the rendezvous, before any process group exists; final all-gather of a text
emulated_host.py       the network namespace of a process of a run on an emulated network
worker_registry.py     addresses and exits of workers, for restarted workers
roll_call.py           all-gather among the surviving ranks through a store
run_settings.py        servers, addresses and names from GOSSAMER_* variables
run_token.py           the run's secret: create, validate and read its file
host_info.py           processor, cores and versions of this machine, and the GPU of each of its workers
"""

from gossamer.comm.environment.launcher_env import JobEnvironment, detect, here, is_spawned_alone
from gossamer.comm.environment.network_interfaces import choose_interface, interface_towards, interfaces
from gossamer.comm.environment.rendezvous import NO_GROUP, comebacks, data_order, device_for, join, leave

__all__ = [
    "NO_GROUP",
    "JobEnvironment",
    "choose_interface",
    "comebacks",
    "data_order",
    "detect",
    "device_for",
    "here",
    "interface_towards",
    "interfaces",
    "is_spawned_alone",
    "join",
    "leave",
]
