"""Compression for Flower: what a ClientApp learned and what a strategy sends travel as payloads of ours.

client_mod    compression_mod: a ClientApp's contributions travel compressed
strategy      CompressedStrategy: wraps a strategy, which sees plain arrays
codec         contributions as bytes, with feedback
versions      compressed differences of what goes down
framing       a payload as the bytes of an Array
array_layout  a record's arrays as one flat tensor
records       Flower's records, made and read
notes         what travels beside arrays
node_state    what a node keeps between rounds

Only strategy needs Flower when it is imported, and the others where they make records.
"""
