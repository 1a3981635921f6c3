"""Traffic: bytes that arrays took in both directions, by round, beside what they would have taken as they are."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RoundTraffic:
    """Bytes of arrays in one round; notes and metrics are not counted."""

    up_bytes: int = 0
    down_bytes: int = 0
    up_plain_bytes: int = 0  # the same contributions, uncompressed
    down_plain_bytes: int = 0
    by_node: dict[int, tuple[int, int]] = field(default_factory=dict)  # (up, down) of each node

    def went_up(self, node: int, nbytes: int, plain: int) -> None:
        self.up_bytes += nbytes
        self.up_plain_bytes += plain
        self._add(node, nbytes, 0)

    def went_down(self, node: int, nbytes: int, plain: int) -> None:
        self.down_bytes += nbytes
        self.down_plain_bytes += plain
        self._add(node, 0, nbytes)

    def _add(self, node: int, up: int, down: int) -> None:
        before_up, before_down = self.by_node.get(node, (0, 0))
        self.by_node[node] = before_up + up, before_down + down
