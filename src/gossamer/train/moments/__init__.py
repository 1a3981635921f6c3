"""Moments: division of momentum and variance between an optimizer and a compressor, and the resulting updates.

take_over.py        the rule for a compressor, or the reason why an optimizer does not support it
transfer.py         common part of all rules: temporary parameter groups during a step; rules without a second moment:
                    SGD's momentum, applied before gradients are sent (DGC); Adam's step is received, except the
                    learning rate (AdamUpdate); parameters move by the sign of the received values (DeMo)
first_moment.py     Adam with an averaged first moment; a second moment that is computed from the received values
                    (CompressedAdam); both moments from the last few of them (MicroAdam)
frozen_variance.py  a second moment that is frozen after a warm-up (OneBitAdam, CompressedAdam), or one number per row
shared_variance.py  Adam with a second moment that all workers have averaged (LocalSGD, DiLoCo)
aligned_moment.py   correction of momentum after a merge, by the difference of a worker's steps to the mean (LocalSGD)
"""
