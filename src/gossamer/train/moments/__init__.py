"""Moments: division of momentum and variance between an optimizer and a compressor, and the resulting updates.

take_over.py        the rule for a compressor, or the reason why an optimizer does not support it
transfer.py         common part of all rules: temporary parameter groups during a step
velocity.py         SGD's momentum, applied before gradients are sent (DGC)
first_moment.py     Adam with an averaged first moment: common part of the rules for its second moment
frozen_variance.py  ... which is frozen after a warm-up (OneBitAdam, CompressedAdam), or one number per row
moving_variance.py  ... which is computed from the received values (CompressedAdam)
shared_variance.py  Adam with a second moment that all workers have averaged (LocalSGD, DiLoCo)
aligned_moment.py   correction of momentum after a merge, by the difference of a worker's steps to the mean (LocalSGD)
window.py           Adam's moments of the last few received gradients (MicroAdam)
whole_step.py       Adam's step is received, except the learning rate (AdamUpdate)
sign.py             parameters move by the sign of the received values (DeMo)
"""
