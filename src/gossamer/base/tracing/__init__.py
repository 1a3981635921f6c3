"""Tracing: what one process does, span by span, written to a file of its own while it trains.

    active          the recorder of this process, None while nothing is recorded
    span_recorder   collects spans of every thread and appends them to the file
    span_buffer     one thread's spans that are not written yet
    record_format   the bytes of a span file
    step_range      which steps are recorded
    clock_identity  which processes read the same clock

Reading the files of all ranks on one clock is gossamer.observe.trace.
"""
