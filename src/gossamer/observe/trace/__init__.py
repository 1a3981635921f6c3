"""Trace: all ranks of a run on one clock, for Perfetto and for Chrome's viewer.

span_files       reads what each process recorded
clock_alignment  offset and drift of each machine's clock, from the operations that all ranks make anyway
torch_operators  reads what torch.profiler wrote beside them
timeline         tracks, slices, arrows and counters on the first machine's clock
perfetto         writes a timeline as TrackEvents
chrome           writes it as trace-event JSON
picture          draws it
"""
