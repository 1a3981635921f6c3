"""What changes a shard, one entry each: enough to make the same changes again."""

from __future__ import annotations
