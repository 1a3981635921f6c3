"""Network interfaces: which one leads to the other workers."""

import socket
import sys
from dataclasses import replace

import pytest

from gossamer.comm.environment import (
    JobEnvironment,
    choose_interface,
    interface_towards,
    interfaces,
    network_interfaces,
    run_settings,
)
from gossamer.errors import ConnectError

SPREAD = JobEnvironment(rank=0, world=4, local_rank=0, local_world=2, master_address="127.0.1.1", master_port=1)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads interfaces as Linux does")


@pytest.fixture
def network(monkeypatch):
    """Pretends that these interfaces, name: address, are up."""

    def pretend(**found):
        owned = {"lo": "127.0.0.1", **found}
        monkeypatch.setattr(sys.modules["gossamer.comm.environment.network_interfaces"], "interfaces", lambda: owned)

    return pretend


@linux
def test_loopback_is_found_by_its_address():
    (name,) = [name for name, address in interfaces().items() if address == "127.0.0.1"]
    assert interface_towards("127.0.0.1") == name
    assert interface_towards("127.0.1.1") == name
    assert name in {name for _, name in socket.if_nameindex()}


@linux
@pytest.mark.skipif(
    ("::1", "lo") not in [(row[0], row[-1]) for row in network_interfaces._ipv6_rows()], reason="no IPv6"
)
def test_an_ipv6_address_leads_to_its_interface():
    assert interface_towards("::1") == "lo"


def test_an_interface_with_an_ipv6_address_only_is_chosen_and_listened_at(monkeypatch):
    monkeypatch.setattr(network_interfaces, "interface_towards", lambda address: "eth6")
    assert choose_interface(replace(SPREAD, master_address="fd77::2")) == "eth6"
    monkeypatch.setattr(run_settings, "global_ipv6_addresses", lambda name: {"eth6": ("fd77::1",)}.get(name, ()))
    monkeypatch.setattr(run_settings, "interfaces", lambda: {"lo": "127.0.0.1", "eth4": "10.0.0.1"})
    for name, address in (("eth6", "fd77::1"), ("eth4", "10.0.0.1"), ("", "127.0.0.1")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert run_settings.own_address() == address


def test_a_name_that_does_not_resolve_leads_nowhere(monkeypatch):
    def refuse(self, address):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert interface_towards("no.such.host") is None


@linux
def test_an_address_of_ones_own_gives_the_interface_that_has_it(network):
    network(veth0="127.0.0.1")  # the kernel answers with the address; the interface is whose it is
    assert interface_towards("127.0.0.1") in {"lo", "veth0"}
    network(lo="127.0.0.2", veth0="127.0.0.1")
    assert interface_towards("127.0.0.1") == "veth0"


@linux
def test_between_machines_loopback_is_never_chosen(network):
    network(eth0="10.0.0.1")
    assert choose_interface(SPREAD) == "eth0"


@linux
def test_on_one_machine_loopback_is_right(network):
    network(eth0="10.0.0.1")
    assert choose_interface(JobEnvironment(world=2, local_world=2, master_address="127.0.1.1")) == "lo"


@linux
@pytest.mark.parametrize("found", [{"eth0": "10.0.0.1", "wlan0": "192.168.0.2"}, {}])
def test_a_doubtful_choice_is_left_to_the_user(network, found):
    network(**found)
    with pytest.raises(ConnectError, match="--interface") as caught:
        choose_interface(SPREAD)
    assert all(f"{name} ({address})" in str(caught.value) for name, address in found.items())
