"""Compressors: rules for what a group sends to compute the mean of many tensors. One file per algorithm.

base            Compressor (any script of collective operations) and Codec (an encoder and a decoder)
per_worker      another codec for workers with slow lines
wrapper         compressors around another: error_feedback, route, sharded, hierarchical, warmup, chain, rotated
dense           all entries, in full or half precision
int8, float4, sign_magnitude, bin_means, eden, twobit, terngrad, onebit, qsgd   quantizers: all entries in few bits;
                quantize has shared code
topk, threshold, dgc, sparse_allreduce       sparse compressors
adaptive        as many entries, distributed over the tensors by their energy
arc_topk, shared_mask, randomk  sparse compressors with the same indices on all ranks; shared_places: their mean
powersgd, random_projection     low-rank compressors, with two factors or one; random_subspace: code shared by
                random_projection and randomk
momentum_wrapper  compressors that do a part of the optimizer's work around another:
adam_momentum   send Adam's momentum: onebit_adam (frozen variance), compressed_adam (variance by a rule)
adam_update     sends Adam's update, from local moments
micro_adam      sends gradients; Adam's moments are those of the last few averaged gradients
demo            sends the largest coefficients of a local momentum
settling        the end of a warm-up without a number of steps
feedback_rules  the state of Feedback: residuals, or known estimates
point_to_point  any compressor between two peers: encode and decode one message
ownership       the part of an optimizer's work that a compressor does, and the rule that then updates parameters
decoding        payloads of a group: sums that overflow, and the sender of an invalid payload
distortion      the relative error of a compressor on a random input
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
from gossamer.algorithms.compressors.per_worker import PerWorker
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
    "PerWorker",
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
