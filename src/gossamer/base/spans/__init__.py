"""Spans: which operation one process is in, from when to when, written to a file of its own while it trains.

    active         the recorder of this process, None while nothing is recorded
    recorder       SpanRecorder collects the spans of all threads and appends them to the file
    record_format  the bytes of a span file
    step_range     the steps that are recorded

`gossamer.observe.trace` reads the files of all ranks and aligns their clocks.
"""
