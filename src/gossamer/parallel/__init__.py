"""Parallel: models whose layers lie on several workers, and what crosses the boundaries between them, compressed."""
