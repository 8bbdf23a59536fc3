"""How hosts are reached: directly, through the gateway, or through IAP and the first of them."""

import pytest

from backends.vm.access import Access, routes
from contracts.errors import RequestError
from contracts.inventory import Gateway, Host, Reach
from tests.launch.slices import make_host, make_inventory, make_slice


def the_routes(*hosts: Host, project: str | None = "p", gateway: Gateway | None = None) -> tuple[Access, ...]:
    return routes(make_inventory(project=project, gateway=gateway), make_slice(hosts, zone="z-a"))


def test_behind_iap_the_first_host_has_a_tunnel_and_the_others_go_through_it() -> None:
    first, second, third = the_routes(
        *(make_host(index, host_keys=(f"ssh-ed25519 AAAA{index}",)) for index in range(3))
    )
    tunnel = ("gcloud", "compute", "start-iap-tunnel", "w-0", "22", "--listen-on-stdin", "--zone", "z-a")
    assert (first.proxy_command, first.through) == ((*tunnel, "--project", "p"), None)
    assert (second.through, third.through) == (first, first)
    assert (second.address, second.host_keys) == ("10.0.0.1", ("ssh-ed25519 AAAA1",))
    # A tunnel of its own, for when the first is gone.
    assert second.otherwise is not None and second.otherwise.through is None
    assert second.otherwise.proxy_command is not None and second.otherwise.proxy_command[3] == "w-1"


def test_the_gateway_is_reached_through_iap_where_there_is_a_project_and_directly_where_there_is_none() -> (
    None
):
    gateway = Gateway(name="g", zone="z-b", address="10.0.0.9", host_keys=("ssh-ed25519 G",), user=None)
    [host] = the_routes(make_host(0, reach="gateway"), gateway=gateway)
    assert host.through is not None
    assert host.through.proxy_command is not None
    assert host.through.proxy_command[3:5] + host.through.proxy_command[6:8] == ("g", "22", "--zone", "z-b")
    [host] = the_routes(make_host(0, reach="gateway"), project=None, gateway=gateway)
    assert host.through is not None
    assert (host.through.proxy_command, host.through.address) == (None, "10.0.0.9")


def test_a_direct_host_is_reached_at_its_outer_address_where_it_has_one() -> None:
    inner, outer = the_routes(
        make_host(0, reach="direct"),
        make_host(1, reach="direct", external_address="h.example:2222"),
        project=None,
    )
    assert (inner.address, inner.port, inner.proxy_command, inner.through) == ("10.0.0.0", 22, None, None)
    assert (outer.address, outer.port) == ("h.example", 2222)
    # OS Login gives the user on hosts of a project only.
    [theirs] = the_routes(make_host(0))
    assert (inner.os_login, theirs.os_login) == (False, True)


@pytest.mark.parametrize(
    ("project", "reach", "message"),
    [
        (None, "gateway", 'w-0: reach "gateway", but the inventory of dev has no gateway'),
        (None, "iap", 'w-0: reach "iap" needs the project'),
        (None, "local", 'w-0: reach "local" is this machine by itself'),
    ],
)
def test_a_way_that_cannot_be_is_refused(project: str | None, reach: Reach, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        the_routes(make_host(0, reach=reach), project=project)
