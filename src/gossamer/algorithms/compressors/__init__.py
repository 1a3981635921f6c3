"""Compressors: rules for what travels when a group agrees on the mean of many tensors. A file for each algorithm.

base            Compressor (any script of collective operations) and Codec (an encoder and a decoder)
wrapper         compressors around another: error_feedback, route, sharded, hierarchical, warmup, chain, rotated
dense           everything, in full or half precision
int8, float4, sign_magnitude, bin_means, eden, twobit, terngrad, onebit, qsgd   every entry in few bits; quantize has
                shared code
topk, threshold, dgc, sparse_allreduce                         few entries; index_regions: who adds up which of them
adaptive        as many entries, spread over the tensors by what waiting costs
arc_topk, shared_mask, randomk  few entries at the same places on all ranks; shared_places: their mean; row_blocks,
                mask_parts: how places are found, by rows or by parts
powersgd, random_projection     two thin factors of a matrix, or one of which the other is drawn; random_subspace: what
                this has in common with randomk
momentum_wrapper  compressors that do a part of the optimizer's work around another:
adam_momentum   Adam's momentum travels: onebit_adam (its variance is frozen), compressed_adam (which follows by a rule)
adam_update     Adam's update travels, of moments that each worker has for itself
micro_adam      gradients travel, and Adam's moments are those of the last few that arrived
demo            momentum of one's own, of which the largest coefficients travel
settling        when a warm-up without a number of steps goes on
feedback_rules  what Feedback remembers: losses, or what the others know
point_to_point  any compressor between two peers: encode and decode one message
ownership       which part of an optimizer's work a compressor takes, and the rule by which parameters then move
decoding        what a group sent: sums that leave their range, and who sent what nobody can read
distortion      how much of a random input a compressor loses
"""

from gossamer.algorithms.compressors.adam_update import AdamUpdate
from gossamer.algorithms.compressors.adaptive import Adaptive
from gossamer.algorithms.compressors.arc_topk import ARCTopK
from gossamer.algorithms.compressors.base import Codec, Compressor
from gossamer.algorithms.compressors.bin_means import BinMeans
from gossamer.algorithms.compressors.chain import Chain
from gossamer.algorithms.compressors.compressed_adam import CompressedAdam
from gossamer.algorithms.compressors.demo import DeMo
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.dgc import DGC
from gossamer.algorithms.compressors.eden import EDEN
from gossamer.algorithms.compressors.error_feedback import Feedback
from gossamer.algorithms.compressors.float4 import Float4
from gossamer.algorithms.compressors.hierarchical import Hierarchical
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.micro_adam import MicroAdam
from gossamer.algorithms.compressors.onebit import OneBit
from gossamer.algorithms.compressors.onebit_adam import OneBitAdam
from gossamer.algorithms.compressors.powersgd import PowerSGD
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.compressors.random_projection import RandomProjection
from gossamer.algorithms.compressors.randomk import RandomK
from gossamer.algorithms.compressors.rotated import Rotated
from gossamer.algorithms.compressors.route import Route
from gossamer.algorithms.compressors.sharded import Sharded
from gossamer.algorithms.compressors.shared_mask import SharedMask
from gossamer.algorithms.compressors.sign_magnitude import SignMagnitude
from gossamer.algorithms.compressors.sparse_allreduce import SparseSum
from gossamer.algorithms.compressors.terngrad import TernGrad
from gossamer.algorithms.compressors.threshold import Threshold
from gossamer.algorithms.compressors.topk import TopK
from gossamer.algorithms.compressors.twobit import TwoBit
from gossamer.algorithms.compressors.warmup import Warmup

__all__ = [
    "DGC",
    "EDEN",
    "QSGD",
    "ARCTopK",
    "AdamUpdate",
    "Adaptive",
    "BinMeans",
    "Chain",
    "Codec",
    "CompressedAdam",
    "Compressor",
    "DeMo",
    "Dense",
    "Feedback",
    "Float4",
    "Hierarchical",
    "Int8",
    "MicroAdam",
    "OneBit",
    "OneBitAdam",
    "PowerSGD",
    "RandomK",
    "RandomProjection",
    "Rotated",
    "Route",
    "Sharded",
    "SharedMask",
    "SignMagnitude",
    "SparseSum",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoBit",
    "Warmup",
]
