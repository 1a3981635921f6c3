"""Traffic: every byte is counted once, for its round and for its node."""

from gossamer.federated.flower.records import RoundTraffic


def test_bytes_add_up() -> None:
    traffic = RoundTraffic()
    traffic.went_down(1, 10, 40)
    traffic.went_down(2, 40, 40)
    traffic.went_up(1, 3, 40)
    assert (traffic.up_bytes, traffic.up_plain_bytes, traffic.down_bytes, traffic.down_plain_bytes) == (3, 40, 50, 80)
    assert traffic.by_node == {1: (3, 10), 2: (0, 40)}
