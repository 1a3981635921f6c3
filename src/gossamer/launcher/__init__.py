"""Launcher: starts a run's processes on this machine, shows their output, and reports why they failed.

job.py               Job, with Serving or Elasticity: script, processes, and their environment
supervisor.py        Supervisor: runs all processes of a launcher by a restart policy; Ctrl-C and SIGTERM end them
restart_policy.py    which workers start again after a failure: all together, the lost one alone, or none
fixed_run.py         launch: a fixed number of workers that start and end together
served_run.py        launch_peers: workers and servers that are restarted one by one
elastic_run.py       launch_members: workers join and leave while the others train, by elastic_policy.py
coordinator.py       the coordinator of an elastic run, in this process or elsewhere
rendezvous.py        rendezvous of several machines, and the launcher's store
process.py           one worker or server over all its restarts, and the preparation of replacements
fork_server.py       starts workers and replacements as forks of one process that has imported torch
process_logs.py      output of processes, shown and kept in one log file each
failure.py           root cause of several failures
worker.py            the program of a worker: runs the user's script and reports its failure
startup.py           progress of workers until the first step
stack_dumps.py       Python stacks of workers: on SIGUSR1, and automatically after a stall
signal_forwarding.py SIGUSR1 and SIGUSR2 to the launcher reach the workers that handle them
preemption_notice.py preemptions that AWS, Google, Azure or a command announce
bandwidth_keeper.py  bandwidth limits of this machine: by the hour, per day, and changed by `gossamer limit`
parent_watchdog.py   kills workers that outlive the launcher
"""
