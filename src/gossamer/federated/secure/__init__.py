"""Secure aggregation: masks that cancel in the sum of a cohort, so that the server learns that and nothing else.

What it holds against: a server that reads everything, and one that lies, as long as fewer devices than 2 t - k collude
with it (of k that hold shares of a secret, or are in the cohort, t give it back, or sign who is in the sum); with few
neighbors a lying server learns sums of parts of the cohort (SecureAggregation says which). What it does not: devices
that send nonsense, which cannot be told from others any more, and differences of the sums of cohorts that differ by one
device.

agreement    what the server and the devices of a round have alike, and the keys that they publish
device       a device's part: keys, shares, the masked vector, one share of each neighbor
cohort       the server's part of one round: phases, who left, the unmasked sum
rounds       SecureRounds: synchronous rounds in these phases
fixed_point  weighted contributions as whole numbers under one scale for all
private_fixed_point  the same under DistributedPrivacy: clipped, and with a share of noise each
linear_code  what of a contribution travels, so that sums of messages mean something
masking      keys, masks, shares, and the ring that sums stay in
graph        who shares masks with whom
roster       identities of devices, pinned by a file
"""
