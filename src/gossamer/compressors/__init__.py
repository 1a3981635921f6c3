"""What travels."""

from gossamer.compressors.base import Codec, Compressor
from gossamer.compressors.dense import Dense
from gossamer.compressors.feedback import Feedback
from gossamer.compressors.lowrank import PowerSGD
from gossamer.compressors.quantise import Int8
from gossamer.compressors.route import Route
from gossamer.compressors.sparse import TopK

__all__ = ["Codec", "Compressor", "Dense", "Feedback", "Int8", "PowerSGD", "Route", "TopK"]
