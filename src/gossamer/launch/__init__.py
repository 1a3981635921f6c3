"""Launch: starts a run's processes on this machine, shows what they print, and says why they failed.

job.py               Job and Serving: what is to be run, and the environment of its processes
elastic_launcher.py  launch: all workers live and die together, on PyTorch's elastic launcher
worker_agent.py      that launcher's agent: starts, watches and ends the workers; agent_store.py: its store
peer_launcher.py     launch_peers: workers and servers are lost and restarted one by one, by supervisor.py
member_launcher.py   launch_members: workers come and go while the others train on, as crew.py decides
member_process.py    one place of such a run, with its processes; restart_policy.py: whether and when it has another
worker_range.py      between how many workers it trains; delayed_notes.py: what its coordinator says
local_coordinator.py its coordinator, or the check of another's; coordinator_link.py: what a launcher asks of it
process.py           one worker or server over all its restarts
standby.py           a server process that has imported everything and waits to replace a lost one
worker.py            the program of a worker: runs the user's script and reports its failure
stack_dumps.py       where workers are, in Python: on SIGUSR1, and by itself once one has waited long
signal_forwarding.py SIGUSR1 and SIGUSR2 to the launcher reach the workers that handle them
startup.py           how far workers are on their way to the first step
failure.py           which of several failures is the cause
stop_request.py      Ctrl-C and SIGTERM: the first lets workers save, the second ends them
parent_watchdog.py   ends workers that outlive the launcher
rendezvous.py        where machines meet, and the launcher's store; ports.py: free ports
periodic.py          an action every few milliseconds in a thread
logs/                what processes print, followed and kept in a log file each
"""
