"""Launch: starts a run's processes on this machine, shows what they print, and says why they failed.

job.py               Job, with Serving or Elasticity: what is to be run, and the environment of its processes
supervisor.py        Supervisor: runs all processes of a launcher by a restart policy; Ctrl-C and SIGTERM end them
restart_policy.py    which workers start again after a failure: all together, the lost one alone, or none
fixed_run.py         launch: a fixed number of workers, which live and die together
served_run.py        launch_peers: workers and servers that are lost and restarted one by one
elastic_run.py       launch_members: workers come and go while the others train on, as elastic_policy.py decides
coordinator.py       the coordinator of an elastic run, in this process or elsewhere
rendezvous.py        where machines meet, and the launcher's store
process.py           one worker or server over all its restarts, and a standby that replaces a lost server
process_logs.py      what processes print, followed and kept in a log file each
failure.py           which of several failures is the cause
worker.py            the program of a worker: runs the user's script and reports its failure
startup.py           how far workers are on their way to the first step
stack_dumps.py       where workers are, in Python: on SIGUSR1, and by itself once one has waited long
signal_forwarding.py SIGUSR1 and SIGUSR2 to the launcher reach the workers that handle them
parent_watchdog.py   ends workers that outlive the launcher
"""
