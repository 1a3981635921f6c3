"""Moments: divide momentum and variance between an optimizer and a compressor, and move parameters by them.

take_over.py        the rule that a compressor asks for, or why an optimizer cannot follow it
transfer.py         what all rules have in common: groups that stand in for the user's during a step
velocity.py         SGD's momentum, applied before gradients travel (DGC)
first_moment.py     Adam's first moment is agreed on: what the rules for its second have in common
frozen_variance.py  ... which stands still (OneBitAdam, CompressedAdam), or does so row by row
moving_variance.py  ... which follows from what arrives (CompressedAdam)
shared_variance.py  Adam's steps divide by a second moment that all workers agreed on (LocalSGD, DiLoCo)
aligned_moment.py   momentum is corrected after a merge by how the mean step differed from a worker's own (LocalSGD)
window.py           Adam's moments of the last few gradients that arrived (MicroAdam)
whole_step.py       Adam's step arrives, but for the learning rate (AdamUpdate)
sign.py             parameters move by the sign of what arrives (DeMo)
"""
