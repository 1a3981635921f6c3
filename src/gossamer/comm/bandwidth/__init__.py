"""Bandwidth limits of one machine, shared by all processes of a launcher.

limits         rates by hour of the day, and a daily cap: their notation
shared_buckets  token buckets in memory that the processes map, and one connection's meter
"""
