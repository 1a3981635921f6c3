"""Advice: recommends the recipe that reaches a loss first, for a script on a network.

candidates      recipes of the whole grammar, the expected loss of each, and findings from gradient statistics
prices          cost of every candidate on a network, and the candidates worth a trial
race            recipes train on the same batches in virtual time, until one is ahead
curves          loss curves over virtual seconds, with intervals, compared with the baseline
thresholds      rates and round trips at which another recipe would be first
measured_links  a network from the measurements of gossamer doctor
advisor         all stages in order: checks the script first, and assembles the advice at the end
answer          the recommendation in three lines
advice_file     the advice as JSON, validated when it is read
page            the advice as one HTML file
"""
