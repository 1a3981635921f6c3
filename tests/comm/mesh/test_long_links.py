"""Long links: congestion control of the user's choice, and buffers for a large bandwidth-delay product."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.mesh_group import Group

from gossamer.base.kernels.library import are_built
from gossamer.comm.elastic.view_listener import settle as settle_of_views
from gossamer.comm.mesh import long_links
from gossamer.comm.mesh.connect import settle
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.long_links import CONGESTION, check_congestion, fit_buffers, requested_congestion

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="not Linux")
SETTINGS = Path("/proc/sys/net/ipv4")


def another_congestion() -> str:
    """One that this process may choose, and that is not the default."""
    allowed = (SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    default = (SETTINGS / "tcp_congestion_control").read_text().strip()
    found = next((each for each in allowed if each != default), "")
    if not found:
        pytest.skip("this machine has only one congestion control")
    return found


def congestion_of(connection: socket.socket) -> str:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as made:
        yield made


def test_connections_keep_the_default_of_the_system(connection, monkeypatch):
    monkeypatch.delenv(CONGESTION, raising=False)
    before = congestion_of(connection)
    settle(connection)
    assert congestion_of(connection) == before


def test_connections_of_fixed_and_elastic_groups_use_the_requested_congestion_control(connection, monkeypatch):
    name = another_congestion()
    monkeypatch.setenv(CONGESTION, name)
    settle(connection)
    assert congestion_of(connection) == name
    assert settle_of_views is settle


@pytest.mark.skipif(not are_built(), reason="the compiled loops are missing")
def test_every_connection_of_a_mesh_uses_the_requested_congestion_control(monkeypatch):
    name = another_congestion()
    monkeypatch.setenv(CONGESTION, name)
    with Group(3) as group:
        used = {congestion_of(each) for sockets in group.sockets for each in sockets if each is not None}
    assert used == {name}


@pytest.mark.parametrize("name", ["nonesuch", "b" * 40, "ü"])
def test_an_unknown_congestion_control_is_refused_with_the_available_ones(name, monkeypatch):
    available = (SETTINGS / "tcp_available_congestion_control").read_text().split()
    with pytest.raises(ValueError, match=f"{name!r}: this machine has {', '.join(available)}"):
        check_congestion(name)
    monkeypatch.setenv(CONGESTION, name)
    with pytest.raises(ValueError, match="this machine has"):
        requested_congestion()


def test_a_congestion_control_for_administrators_only_is_refused_with_the_line_that_allows_it(monkeypatch):
    def refuse(connection, name):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(long_links, "use_congestion", refuse)
    allowed = (SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    line = f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{" ".join([*allowed, "bbr"])}"'
    with pytest.raises(ValueError, match="this user may choose") as caught:
        check_congestion("bbr")
    assert line in str(caught.value)


def test_an_empty_setting_requests_nothing(monkeypatch):
    monkeypatch.setenv(CONGESTION, "")
    assert requested_congestion() is None


class Recorded:
    """A socket that records its options, and may refuse those of administrators."""

    family = socket.AF_INET

    def __init__(self, *, privileged: bool) -> None:
        self.privileged, self.options = privileged, dict[int, int]()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if option in (32, 33) and not self.privileged:
            raise PermissionError(1, "Operation not permitted")
        self.options[option] = value


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The system's limits: automatic buffers up to 4 MB, others up to 3 MB."""
    (tmp_path / "ipv4").mkdir()
    (tmp_path / "core").mkdir()
    for name in ("tcp_wmem", "tcp_rmem"):
        (tmp_path / "ipv4" / name).write_text("4096 16384 4000000\n")
    for name in ("wmem_max", "rmem_max"):
        (tmp_path / "core" / name).write_text("3000000\n")
    monkeypatch.setattr(long_links, "SETTINGS", tmp_path / "ipv4")
    return tmp_path


def fitted(rate: float, seconds: float, *, privileged: bool = True) -> dict[int, int]:
    recorded = Recorded(privileged=privileged)
    fit_buffers(1, [recorded, None], Links.alike(((0.0, seconds), (seconds, 0.0)), rate))
    return recorded.options


def test_buffers_of_a_short_or_slow_link_are_left_to_the_system(settings):
    assert fitted(10e9, 0.0002) == {}
    assert fitted(20e6, 0.1) == {}


def test_buffers_of_a_long_fast_link_hold_several_times_the_bandwidth_delay_product(settings):
    assert fitted(400e6, 0.1) == {32: 20_000_000, 33: 20_000_000}


def test_buffers_are_bounded(settings):
    assert fitted(100e9, 1.0) == {32: 2**26, 33: 2**26}


def test_without_permission_buffers_grow_to_the_limit_of_the_administrator(settings):
    assert fitted(400e6, 0.1, privileged=False) == {socket.SO_SNDBUF: 3_000_000, socket.SO_RCVBUF: 3_000_000}


def test_without_permission_buffers_never_shrink(settings):
    for name in ("wmem_max", "rmem_max"):
        (settings / "core" / name).write_text("212992\n")
    assert fitted(400e6, 0.1, privileged=False) == {}


def test_the_limits_of_both_directions_are_separate(settings):
    (settings / "ipv4" / "tcp_rmem").write_text("4096 131072 33000000\n")
    assert fitted(400e6, 0.1) == {32: 20_000_000}
    sends_slowly = Links(((0.0, 0.1), (0.1, 0.0)), up=(400e6, 10e6), down=(400e6, 400e6), losses=((0.0,) * 2,) * 2)
    (settings / "ipv4" / "tcp_rmem").write_text("4096 131072 4000000\n")
    recorded = Recorded(privileged=True)
    fit_buffers(1, [recorded, None], sends_slowly)
    assert recorded.options == {33: 20_000_000}


def test_a_system_without_these_settings_keeps_its_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr(long_links, "SETTINGS", tmp_path)
    assert fitted(400e6, 0.1) == {}


def test_an_administrators_connection_gets_larger_buffers_than_the_system_would_grow(connection):
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 32, 2**20)
        except PermissionError:
            pytest.skip("needs permission to configure networks")
    fit_buffers(0, [None, connection], Links.alike(((0.0, 0.2), (0.2, 0.0)), 1e9))
    automatic = int((SETTINGS / "tcp_wmem").read_text().split()[-1])
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > automatic
