"""Environment: which job this process is in, how its workers rendezvous, and what the launcher told them.

launcher_env.py        rank and world size from torchrun's, mpirun's or srun's variables, or from TF_CONFIG
rendezvous.py          joins the process group once all ranks have come and reach each other, on a GPU of its own
join_errors.py         what is wrong where ranks do not meet, and what to do
wait_timeout.py        how long to wait for others, by argument or variable; wait_progress.py: says so meanwhile
interruptible_call.py  a blocking call of torch's in a thread, while the caller hears of Ctrl-C and of lost ranks
meeting.py             the protocol by which ranks prove themselves, hear of each other and of who has left
meeting_server.py      the meeting's thread in rank 0; meeting_member.py: each rank's connection to it
meeting_place.py       where the meeting is, and torch's store for the group
listening.py           a listening socket at one address of this machine
network_interfaces.py  IPv4 interfaces, and the one that leads to the other workers
store.py               a key-value store at the rendezvous, before any process group
closing_exchange.py    each rank's last text for all others, through the store of the process group
worker_registry.py     addresses and ends of workers, for those that come back
roll_call.py           values of the ranks that are left, agreed on through a store; survivor_calls.py: this process's
run_settings.py        servers, TLS and names from GOSSAMER_* variables
run_token.py           the run's secret: made, checked and read
rank_environment.py    versions, platform and settings of this process, without secrets
host_info.py           processor, cores and versions of this machine
"""

from gossamer.comm.environment.launcher_env import JobEnvironment, detect, here
from gossamer.comm.environment.network_interfaces import choose_interface, interface_towards, interfaces
from gossamer.comm.environment.rendezvous import NO_GROUP, comebacks, device_for, join, leave

__all__ = [
    "NO_GROUP",
    "JobEnvironment",
    "choose_interface",
    "comebacks",
    "detect",
    "device_for",
    "here",
    "interface_towards",
    "interfaces",
    "join",
    "leave",
]
