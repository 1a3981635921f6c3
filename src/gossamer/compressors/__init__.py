"""Compressors: rules for what travels when a group agrees on the mean of many tensors. A file for each algorithm.

base            Compressor (any script of collective operations) and Codec (an encoder and a decoder)
wrapper         compressors around another: error_feedback, route, sharded, hierarchical, warmup, chain
dense           everything, in full or half precision
int8, float4, sign_magnitude, twobit, terngrad, onebit, qsgd   every entry in few bits; quantize: what they share
topk, threshold, randomk, dgc, sparse_allreduce                few entries; index_regions: who adds up which of them
powersgd        two thin factors of a matrix
onebit_adam     Adam's momentum, once its variance is frozen
point_to_point  any compressor between two peers: encode and decode one message
decoding        what a group sent: sums that leave their range, and who sent what nobody can read
distortion      how much of a random input a compressor loses
"""

from gossamer.compressors.base import Codec, Compressor
from gossamer.compressors.chain import Chain
from gossamer.compressors.dense import Dense
from gossamer.compressors.dgc import DGC
from gossamer.compressors.error_feedback import Feedback
from gossamer.compressors.float4 import Float4
from gossamer.compressors.hierarchical import Hierarchical
from gossamer.compressors.int8 import Int8
from gossamer.compressors.onebit import OneBit
from gossamer.compressors.onebit_adam import OneBitAdam
from gossamer.compressors.powersgd import PowerSGD
from gossamer.compressors.qsgd import QSGD
from gossamer.compressors.randomk import RandomK
from gossamer.compressors.route import Route
from gossamer.compressors.sharded import Sharded
from gossamer.compressors.sign_magnitude import SignMagnitude
from gossamer.compressors.sparse_allreduce import SparseSum
from gossamer.compressors.terngrad import TernGrad
from gossamer.compressors.threshold import Threshold
from gossamer.compressors.topk import TopK
from gossamer.compressors.twobit import TwoBit
from gossamer.compressors.warmup import Warmup

__all__ = [
    "DGC",
    "QSGD",
    "Chain",
    "Codec",
    "Compressor",
    "Dense",
    "Feedback",
    "Float4",
    "Hierarchical",
    "Int8",
    "OneBit",
    "OneBitAdam",
    "PowerSGD",
    "RandomK",
    "Route",
    "Sharded",
    "SignMagnitude",
    "SparseSum",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoBit",
    "Warmup",
]
