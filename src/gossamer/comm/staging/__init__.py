"""Staging: transfers device tensors over connections that only access host memory, chunk by chunk.

device_copies  operations of a device: pinned memory, asynchronous copies, events; for CUDA and CPU
pinned_arena   bounded pinned memory that chunks share
staging_area   an arena that reuses memory once copies from it are complete, and operations in it: a chunk is
               transferred while the next one is copied
chunk_tables   which bytes or elements are in which chunk: pure functions of integers
"""
