"""The API server is Kubernetes' own: it refuses what a cluster would refuse, and nothing of it stays."""

from __future__ import annotations

import ipaddress
import itertools
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import MaxRetryError

from rehearsal.kubernetes import cluster, nodes
from rehearsal.kubernetes.control_plane import (
    CONTEXT,
    VERSION,
    Layout,
    LocalControlPlane,
    arguments,
    corefile,
)
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.servers import Network


def api(kubeconfig: Path) -> Any:
    return config.new_client_from_config(str(kubeconfig), context=CONTEXT)


def job(**template: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "resources": {"limits": {"google.com/tpu": "4"}}}
    pod = {"restartPolicy": "Never", "containers": [container], **template}
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"},
        "spec": {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "template": {"spec": pod}},
    }  # fmt: skip


def test_the_api_server_is_of_the_version_asked_for_and_knows_every_field(
    control_plane: LocalControlPlane,
) -> None:
    with api(control_plane.kubeconfig) as connection:
        assert client.VersionApi(connection).get_code().git_version == VERSION
        jobs = client.BatchV1Api(connection)
        options = {"dry_run": "All", "field_validation": "Strict"}
        assert jobs.create_namespaced_job("default", job(), **options).metadata.uid
        with pytest.raises(ApiException) as refused:
            jobs.create_namespaced_job("default", job(restartsPolicy="Never"), **options)
        assert refused.value.status == 400
        assert 'unknown field \\"spec.template.spec.restartsPolicy\\"' in refused.value.body
        assert not jobs.list_namespaced_job("default").items


def test_nobody_without_a_certificate_may_do_anything_and_nothing_is_left(
    control_plane: LocalControlPlane, tmp_path: Path
) -> None:
    folder = tmp_path / "second"
    with LocalControlPlane(folder=folder, programs=control_plane.programs) as second:
        with api(control_plane.kubeconfig) as connection:
            connection.configuration.host = second.layout.server
            with pytest.raises(MaxRetryError, match="CERTIFICATE_VERIFY_FAILED"):
                client.CoreV1Api(connection).list_namespace(_request_timeout=5)
        second.authority.kubeconfig(folder / "nobody", second.layout.server, "nobody", context=CONTEXT)
        with api(folder / "nobody") as connection, pytest.raises(ApiException) as refused:
            client.CoreV1Api(connection).list_namespace()
        assert refused.value.status == 403
        processes = list(second.running.values())
    assert len(processes) == 2 and None not in [process.poll() for process in processes]
    assert not folder.exists()


def test_one_that_does_not_start_says_why_and_leaves_nothing(
    control_plane: LocalControlPlane, tmp_path: Path
) -> None:
    folder = tmp_path / "third"
    programs = {**control_plane.programs, "kube-apiserver": Path("/bin/false")}
    with pytest.raises(MachinesError, match="kube-apiserver ended; it said last"):
        LocalControlPlane(folder=folder, programs=programs).__enter__()
    assert not folder.exists()


def test_every_component_is_told_where_the_others_are() -> None:
    layout = Layout(credentials="/c", data="/d", address="10.0.0.9", port=1, etcd_port=2, peer_port=3)
    assert "--listen-client-urls=http://127.0.0.1:2" in arguments("etcd", layout)
    assert "--etcd-servers=http://127.0.0.1:2" in arguments("kube-apiserver", layout)
    assert "--bind-address=10.0.0.9" in arguments("kube-apiserver", layout)
    for name in ("kube-controller-manager", "kube-scheduler"):
        assert f"--kubeconfig=/c/{name}.kubeconfig" in arguments(name, layout)
    services, others = corefile(layout).split("\n.:53 ")
    assert "bind 10.0.0.9" in services and "kubernetes cluster.local" in services
    # In one block CoreDNS would ask `template` before `kubernetes`, and no service would have a name.
    assert "template" not in services and "rcode NXDOMAIN" in others


def test_nodes_share_out_the_addresses_of_their_network_and_no_two_pods_get_the_same() -> None:
    network = Network(
        name="n", subnet="172.20.0.0/16", laptop_address="172.20.0.1", storage_address="172.20.255.254",
        registry_address="172.20.255.253",
    )  # fmt: skip
    ranges = [
        tuple(map(ipaddress.IPv4Address, nodes.pod_addresses(network, index)))
        for index in range(nodes.MOST_NODES)
    ]
    others = [*network.addresses(240), network.storage_address, nodes.control_plane_address(network)]
    assert all(first < last for first, last in ranges)
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(ranges))
    assert not [
        each for each in map(ipaddress.IPv4Address, others) for first, last in ranges if first <= each <= last
    ]
    with pytest.raises(MachinesError, match="at most 14 nodes"):
        nodes.pod_addresses(network, nodes.MOST_NODES)


def test_the_rehearsals_user_has_the_rights_that_the_page_tells_people_to_ask_for() -> None:
    role = cluster.launch_role(cluster.PAGE.read_text())
    resources = {each for rule in role["rules"] for each in rule["resources"]}
    assert {"jobs", "pods", "pods/exec", "services"} <= resources and "secrets" not in resources
    assert "namespace" not in role["metadata"]
