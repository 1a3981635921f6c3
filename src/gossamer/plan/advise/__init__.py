"""Advice: which recipe reaches the loss first, for a script on a network.

pricing         what every recipe of the grammar would cost, and which are worth a trial
racing          recipes train on the same batches in virtual time, until it shows which is ahead
script_check    a few steps: whether a script logs a loss, and repeats itself
measured_links  a network from what gossamer doctor found
advisor         the stages, one after the other
answer          what to say of it, in three lines
whole_advice    gathers what was foretold, raced and answered
advice_file     all of it as JSON, checked where it is read
page            all of it as one HTML file
"""
