"""Layers on several workers: remote modules, and compressed boundaries between pipeline stages."""

from gossamer.train.parallel import Boundary, CompressedStage, RemoteModule, RemoteOptimizer, boundary, remote

__all__ = ["Boundary", "CompressedStage", "RemoteModule", "RemoteOptimizer", "boundary", "remote"]
