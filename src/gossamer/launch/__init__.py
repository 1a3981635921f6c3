"""Launch: starts a run's processes on this machine, shows what they print, and says why they failed.

job.py               Job and Serving: what is to be run, and the environment of its processes
elastic_launcher.py  launch: all workers live and die together, on PyTorch's elastic launcher; agent_store.py: its store
peer_launcher.py     launch_peers: workers and servers are lost and restarted one by one, by supervisor.py
process.py           one worker or server over all its restarts
standby.py           a server process that has imported everything and waits to replace a lost one
worker.py            the program of a worker: runs the user's script and reports its failure
failure.py           which of several failures is the cause
reaper.py            ends workers that outlive their run; parent_watchdog.py: those that outlive the launcher
rendezvous.py        where machines meet, and the launcher's store; ports.py: free ports
periodic.py          an action every few milliseconds in a thread
logs/                what processes print, followed and kept in a log file each
"""
