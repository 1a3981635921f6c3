"""Observing a run: event listeners that write live progress, the record at the end, and pictures of records.

recorder    listens to one rank's events: keeps its numbers, writes live lines
live        reads the live lines of this machine's ranks
terminal    shows a run: worker lines, progress, closing table
record      rank records, and the run's record made from them
comparison  records side by side: speed, loss at equal time and steps, money
plot, page  a comparison as a picture, and as one HTML file
target      ends a run once a metric is good enough or time is up
units       numbers as text: 1.2 MB, 34 ms, 12 %
"""
