"""Trace: all ranks of a run on one clock, for ui.perfetto.dev and for Chrome's viewer.

span_files       reads the recorded spans and operators of each process
clock_alignment  offset and drift of each machine's clock, from the collective operations of the run
timeline         tracks, slices, arrows and counters on the first machine's clock
chrome           writes a timeline as trace-event JSON
picture          draws a timeline
"""
