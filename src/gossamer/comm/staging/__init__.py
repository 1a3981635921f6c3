"""Staging: tensors of a device travel by connections that only know this machine's memory, chunk by chunk.

device_copies  what a device can do for it: pinned memory, copies beside the computing, events; CUDA and processors
pinned_arena   the pinned memory that chunks take in turns, bounded
staging_area   an arena that takes memory back once what was copied from it has arrived
chunk_tables   which bytes, or numbers, are in which chunk: pure functions of integers
byte_views     a payload's tensors as bytes, and which of them go where in a slot
staged_op      one operation under way: a chunk travels while the next one is copied
"""
