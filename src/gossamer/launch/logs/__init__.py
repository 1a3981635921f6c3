"""Logs: what a run's processes print, shown as it comes and kept in one log file per process.

follow.py     reads growing files by lines, and writes the log of each worker
streams.py    the same for servers, which start one by one
patient_file.py  where both are written to: a full disk ends no print
"""
