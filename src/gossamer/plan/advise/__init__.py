"""Advice: which recipe reaches the loss first, for a script on a network.

candidates      recipes of the whole grammar, what each is expected to lose, and what gradients tell of them
prices          what every candidate would cost on a network, and which are worth a trial
race            recipes train on the same batches in virtual time, until it shows which is ahead
curves          their losses over virtual seconds, with intervals, beside the baseline
thresholds      at which rates and delays another recipe would be the first
measured_links  a network from what gossamer doctor found
advisor         the stages, one after the other: checks the script first, gathers all at the end
answer          what to say of it, in three lines
advice_file     all of it as JSON, checked where it is read
page            all of it as one HTML file
"""
