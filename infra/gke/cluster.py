"""The cluster of a stack (GKE), its node pools, and who may do what in it. Nodes have no way in.

What is inside a cluster is not declared here: the launcher makes the namespace and the service account of a stack when
they are missing, and a network policy for each run, in a GKE cluster as in any other. A second provider, which has to
reach the API server at every `pulumi up`, would be needed for them.
"""

from __future__ import annotations

import base64
import dataclasses

import pulumi
from pulumi_gcp import artifactregistry, compute, container, projects, serviceaccount, storage

from contracts import inventory
from infra import naming
from infra.bucket_and_images import BUCKET_ROLES, READ_IMAGES, bucket_condition
from infra.config import ClusterConfig, Config, SliceConfig
from infra.gke.node_pools import ATTEMPT, Hooks, Observed, pool_names
from infra.iam import LONGEST_ACCOUNT_ID
from infra.slice_apis.slice_api import SCOPES

POD_RANGE, SERVICE_RANGE = "172.20.0.0/14", "172.24.0.0/20"
"""Outside the range of the subnets (`infra.network.OWN_RANGE`), so that a region that joins later meets neither."""

PODS_PER_NODE = 15
"""A node of a TPU has one pod of a run beside GKE's own; each takes a /27 of the pods' range so."""

SPOT_GRACE_S, SPOT_GRACE_OF_SYSTEM_S = 120, 15
"""How long a node goes on after Google has taken it back, and the part of it that GKE's own pods have. By default it is
30 s and 15 (https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms; from 1.35.0-gke.1171000 on)."""

ONLY_WHEN_MADE = ("nodeConfig.shieldedInstanceConfig",)
"""What a pool gets when it is made and cannot be given later: a pool that was made without it keeps its nodes."""

NODE_ROLE = "roles/container.defaultNodeServiceAccount"
"""Logs and metrics of nodes: the least that GKE asks for its nodes
(https://cloud.google.com/kubernetes-engine/docs/how-to/hardening-your-cluster#use_least_privilege_sa)."""

_VERBS = {
    "clusters": "connect get list",
    "events": "list",
    "jobs": "create delete get list update",
    "namespaces": "create get list",
    "networkPolicies": "create get update",
    "nodes": "get list",
    "pods": "delete exec get getLogs list portForward",
    "secrets": "create",
    "selfSubjectAccessReviews": "create",
    "serviceAccounts": "create get list",
    "services": "create delete get list update",
    "thirdPartyObjects": "create delete get list update",
}
LAUNCH = tuple(f"container.{kind}.{verb}" for kind, verbs in _VERBS.items() for verb in verbs.split())
"""What launching needs (https://docs.cloud.google.com/iam/docs/roles-permissions/container). JobSets are third-party
objects. Of secrets it can make those of runs; no secret can be read or changed with it, no role, no node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeArgs:
    """network, subnetwork: full names, of the cluster's region. bucket: its resource; None where there is none.

    observed, hooks: of `infra.gke.node_pools`.
    """

    config: Config
    cluster: ClusterConfig
    owner: pulumi.Input[str]
    network: pulumi.Input[str]
    subnetwork: pulumi.Input[str]
    bucket: storage.Bucket | None
    observed: Observed
    hooks: Hooks | None


class Gke(pulumi.ComponentResource):
    """`entry` is what the inventory says of it, `name` its name, `nodes` the email of what its nodes act as."""

    entry: pulumi.Output[inventory.Cluster]

    def __init__(self, name: str, args: GkeArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:cluster:Gke", name, {}, opts)
        config, cluster, child = args.config, args.cluster, pulumi.ResourceOptions(parent=self)
        self.nodes = _node_account(config, child)
        gke_cluster = self._cluster(args)
        self.name = gke_cluster.name
        attempt = args.observed.attempt(naming.SYSTEM_POOL)
        container.NodePool(
            naming.SYSTEM_POOL,
            name=naming.SYSTEM_POOL,
            project=config.project,
            cluster=gke_cluster.name,
            location=cluster.zone,
            node_count=1,
            node_config=_node_config(config, self.nodes, cluster.machine_type, attempt=attempt),
            opts=_pool_options(self, attempt, args.hooks),
        )
        _let_pods_use_the_bucket(config, cluster, args.bucket, gke_cluster, child)
        _let_people_launch(config, args.owner, child)
        self.entry = pulumi.Output.all(
            name=gke_cluster.name,
            dns=gke_cluster.control_plane_endpoints_config.dns_endpoint_config.endpoint,
            address=gke_cluster.endpoint,
            # The provider marks the client key of master_auth as secret, and with it every value that is read from it.
            authority=pulumi.Output.unsecret(gke_cluster.master_auth.cluster_ca_certificate),
        ).apply(lambda outputs: entry(cluster, **outputs))
        self.register_outputs({"name": self.name})

    def _cluster(self, args: GkeArgs) -> container.Cluster:
        """Declare the cluster itself: private nodes, Dataplane V2, workload identity, no node pool yet."""
        config, cluster = args.config, args.cluster
        own_network = config.network.existing is None
        return container.Cluster(
            "cluster",
            name=naming.cluster_name(config.stack),
            project=config.project,
            location=cluster.zone,
            description=f"tpu-stack {config.stack}",
            network=args.network,
            subnetwork=args.subnetwork,
            networking_mode="VPC_NATIVE",
            ip_allocation_policy=container.ClusterIpAllocationPolicyArgs(
                cluster_ipv4_cidr_block=POD_RANGE if own_network else None,
                services_ipv4_cidr_block=SERVICE_RANGE if own_network else None,
            ),
            private_cluster_config=container.ClusterPrivateClusterConfigArgs(enable_private_nodes=True),
            control_plane_endpoints_config=_endpoints(cluster),
            master_authorized_networks_config=_authorized(cluster),
            master_auth=container.ClusterMasterAuthArgs(
                client_certificate_config=container.ClusterMasterAuthClientCertificateConfigArgs(
                    issue_client_certificate=False
                )
            ),
            enable_legacy_abac=False,
            # Dataplane V2 is what enforces network policies.
            datapath_provider="ADVANCED_DATAPATH",
            release_channel=container.ClusterReleaseChannelArgs(channel=cluster.release_channel.upper()),
            workload_identity_config=container.ClusterWorkloadIdentityConfigArgs(
                workload_pool=_identity_pool(config)
            ),
            # A cluster cannot be made without nodes: these go at once, and the pool below takes their place.
            remove_default_node_pool=True,
            initial_node_count=1,
            node_config=container.ClusterNodeConfigArgs(
                service_account=self.nodes,
                oauth_scopes=list(SCOPES),
                machine_type=cluster.machine_type,
                shielded_instance_config=container.ClusterNodeConfigShieldedInstanceConfigArgs(
                    enable_secure_boot=True, enable_integrity_monitoring=True
                ),
            ),
            deletion_protection=False,
            resource_labels=naming.labels(config.stack),
            opts=pulumi.ResourceOptions(
                parent=self,
                # What GKE shows of the nodes that are gone would make it all again.
                ignore_changes=["nodeConfig", "initialNodeCount"],
                hooks=args.hooks.cluster if args.hooks else None,
            ),
        )


def existing(cluster: ClusterConfig) -> inventory.Cluster:
    """The cluster of a kubeconfig's context: nothing of it is made."""
    return inventory.Cluster(
        name=cluster.context or "",
        context=cluster.context,
        namespace=cluster.namespace,
        service_account=cluster.service_account,
    )


def entry(
    cluster: ClusterConfig, *, name: str, dns: str | None, address: str | None, authority: str | None
) -> inventory.Cluster:
    """A cluster as the inventory has it. dns, address: of its API server. authority: base64, of that address."""
    by_address = bool(cluster.authorized_networks)
    return inventory.Cluster(
        name=name,
        context=None,
        endpoint=f"https://{address if by_address else dns}",
        # Google's own authorities have signed what answers under the DNS name.
        ca_certificate=base64.b64decode(authority).decode() if by_address and authority else None,
        namespace=cluster.namespace,
        service_account=cluster.service_account,
    )


def _endpoints(cluster: ClusterConfig) -> container.ClusterControlPlaneEndpointsConfigArgs:
    """Access by a DNS name, where IAM decides before the API server is reached, or by an address for few networks."""
    by_address = bool(cluster.authorized_networks)
    return container.ClusterControlPlaneEndpointsConfigArgs(
        dns_endpoint_config=container.ClusterControlPlaneEndpointsConfigDnsEndpointConfigArgs(
            allow_external_traffic=not by_address
        ),
        ip_endpoints_config=container.ClusterControlPlaneEndpointsConfigIpEndpointsConfigArgs(
            enabled=by_address
        ),
    )


def _authorized(cluster: ClusterConfig) -> container.ClusterMasterAuthorizedNetworksConfigArgs | None:
    if not cluster.authorized_networks:
        return None
    return container.ClusterMasterAuthorizedNetworksConfigArgs(
        cidr_blocks=[
            container.ClusterMasterAuthorizedNetworksConfigCidrBlockArgs(cidr_block=cidr_block)
            for cidr_block in cluster.authorized_networks
        ],
        gcp_public_cidrs_access_enabled=False,
    )


def _identity_pool(config: Config) -> str:
    return f"{config.project}.svc.id.goog"


def _node_account(config: Config, opts: pulumi.ResourceOptions) -> pulumi.Output[str]:
    """The nodes' service account: it pulls images, and writes logs and metrics. What pods may do is not its to say."""
    account = serviceaccount.Account(
        "nodes",
        account_id=naming.resource_name(config.stack, "nodes", longest=LONGEST_ACCOUNT_ID),
        project=config.project,
        display_name=f"Nodes of {config.stack}",
        opts=opts,
    )
    member = account.email.apply(lambda email: f"serviceAccount:{email}")
    projects.IAMMember("nodes", project=config.project, role=NODE_ROLE, member=member, opts=opts)
    artifactregistry.RepositoryIamMember(
        "nodes",
        project=config.project,
        location=config.images.region,
        repository=config.images.repository,
        role=READ_IMAGES,
        member=member,
        opts=opts,
    )
    return account.email


def _let_pods_use_the_bucket(
    config: Config,
    cluster: ClusterConfig,
    bucket: storage.Bucket | None,
    gke_cluster: container.Cluster,
    opts: pulumi.ResourceOptions,
) -> None:
    """Grant the pods' service account access by Workload Identity, without an account of Google's in between
    (https://cloud.google.com/kubernetes-engine/docs/concepts/workload-identity).
    Its pool is there once a cluster is.
    """
    if bucket is None:
        return
    subject = f"{_identity_pool(config)}/subject/ns/{cluster.namespace}/sa/{cluster.service_account}"
    member = bucket.project_number.apply(
        lambda number: (
            f"principal://iam.googleapis.com/projects/{number}/locations/global/workloadIdentityPools/{subject}"
        )
    )
    for scope, role in BUCKET_ROLES.items():
        storage.BucketIAMMember(
            f"pods {scope}",
            bucket=bucket.name,
            role=role,
            member=member,
            condition=bucket_condition(config, role),
            opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[gke_cluster])),
        )


def _let_people_launch(config: Config, owner: pulumi.Input[str], opts: pulumi.ResourceOptions) -> None:
    people = dict.fromkeys((*config.access.administrators, *config.access.members))
    role = projects.IAMCustomRole(
        "launch",
        # A role that was deleted keeps its id for weeks, and a stack of the same name has another owner.
        role_id=pulumi.Output.from_input(owner).apply(lambda owner: f"tpuStackLaunch_{owner}"),
        project=config.project,
        title=f"Launch runs of tpu-stack {config.stack}",
        description="Starts, follows and stops runs in clusters of the project",
        permissions=list(LAUNCH),
        opts=opts,
    )
    for person in people:
        projects.IAMMember(
            f"launch {person}", project=config.project, role=role.name, member=person, opts=opts
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolsArgs:
    """slice_config: the slice's own part of `config`. cluster, zone: the name and the zone of
    the cluster. nodes: what they act as, an email. observed, hooks: of `infra.gke.node_pools`."""

    config: Config
    slice_config: SliceConfig
    cluster: pulumi.Input[str]
    zone: str
    nodes: pulumi.Input[str]
    observed: Observed
    hooks: Hooks | None


class Pools(pulumi.ComponentResource):
    """The node pools of one slice: one, or `count`."""

    def __init__(self, name: str, args: PoolsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:cluster:Pools", name, {}, opts)
        slice_config, child = args.slice_config, pulumi.ResourceOptions(parent=self)
        placement = _placement(args, child)
        flex_start = slice_config.capacity == "flex-start"
        for pool in pool_names(slice_config):
            attempt = args.observed.attempt(pool)
            container.NodePool(
                pool,
                name=pool,
                project=args.config.project,
                cluster=args.cluster,
                location=args.zone,
                node_locations=[slice_config.zone],
                max_pods_per_node=PODS_PER_NODE,
                # Without a count a new pool has no nodes, and a pool that is there keeps those that it has. An initial
                # count cannot be changed: with one, GKE would make the pool again, and its nodes would be lost.
                node_count=None if slice_config.scale_to_zero else slice_config.accelerator.hosts,
                # Google holds the size of a slice against the limit of its one zone, not against a total
                # (https://github.com/vllm-project/ci-infra/pull/545).
                autoscaling=container.NodePoolAutoscalingArgs(
                    min_node_count=0, max_node_count=slice_config.accelerator.hosts, location_policy="ANY"
                )
                if slice_config.scale_to_zero
                else None,
                placement_policy=placement,
                # Nodes of flex-start are not repaired: they end, and Google's queue gives others.
                management=container.NodePoolManagementArgs(auto_repair=not flex_start, auto_upgrade=True),
                node_config=_node_config(
                    args.config,
                    args.nodes,
                    slice_config.accelerator.machine_type,
                    slice_config,
                    attempt=attempt,
                ),
                opts=pulumi.ResourceOptions.merge(
                    _pool_options(self, attempt, args.hooks),
                    pulumi.ResourceOptions(
                        custom_timeouts=pulumi.CustomTimeouts(create=f"{slice_config.wait_s}s")
                    ),
                ),
            )
        self.register_outputs({})


def _pool_options(
    parent: pulumi.Resource, attempt: str | None, hooks: Hooks | None
) -> pulumi.ResourceOptions:
    """attempt: as in `_node_config`. Without one, that of an earlier `pulumi up` stays as it is."""
    return pulumi.ResourceOptions(
        parent=parent,
        # The name is fixed, so that one that failed is not made again beside its remains.
        delete_before_replace=True,
        ignore_changes=[*ONLY_WHEN_MADE, *([] if attempt else [f'nodeConfig.metadata["{ATTEMPT}"]'])],
        hooks=hooks.pool if hooks else None,
    )


def slice_entry(config: Config, slice_config: SliceConfig) -> inventory.Slice:
    """The slice as the inventory has it. A run's pods are its hosts."""
    accelerator, kind = slice_config.accelerator, slice_config.accelerator.node_kind
    assert kind is not None and accelerator.machine_type is not None
    return inventory.Slice(
        name=slice_config.name,
        accelerator_type=accelerator.type_name,
        generation=accelerator.generation.name,
        topology=accelerator.topology,
        zone=slice_config.zone,
        capacity=slice_config.capacity,
        origin=f"node-pool {slice_config.name}",
        count=slice_config.count,
        devices_per_host=accelerator.devices_per_host,
        hosts=(),
        pool=inventory.NodePool(
            machine_type=accelerator.machine_type,
            accelerator=kind.label,
            nodes=accelerator.hosts,
            reservation=slice_config.reservation.rpartition("/")[2] if slice_config.reservation else None,
            scales_to_zero=slice_config.scale_to_zero or config.is_elsewhere(slice_config),
        ),
    )


def _placement(args: PoolsArgs, opts: pulumi.ResourceOptions) -> container.NodePoolPlacementPolicyArgs | None:
    """The placement that wires the nodes of a slice together; None for one node."""
    slice_config, kind = args.slice_config, args.slice_config.accelerator.node_kind
    if slice_config.accelerator.hosts == 1 or kind is None:
        return None
    topology = slice_config.accelerator.topology
    if not kind.workload_policy:
        return container.NodePoolPlacementPolicyArgs(type="COMPACT", tpu_topology=topology)
    policy = compute.ResourcePolicy(
        slice_config.name,
        name=naming.resource_name(args.config.stack, slice_config.name),
        project=args.config.project,
        region=slice_config.region,
        description=f"Slice {slice_config.name} of tpu-stack {args.config.stack}",
        workload_policy=compute.ResourcePolicyWorkloadPolicyArgs(
            type="HIGH_THROUGHPUT", accelerator_topology=topology
        ),
        opts=opts,
    )
    # Google shows no type of such a pool: with one, every `up` would replace it.
    return container.NodePoolPlacementPolicyArgs(type="", policy_name=policy.name, tpu_topology=topology)


def _node_config(
    config: Config,
    nodes: pulumi.Input[str],
    machine_type: str | None,
    slice_config: SliceConfig | None = None,
    *,
    attempt: str | None = None,
) -> container.NodePoolNodeConfigArgs:
    """slice_config: the slice that the nodes belong to; None: they are for GKE's own pods.

    attempt: see `infra.gke.node_pools`; set for a pool that has to be made again.
    """
    capacity = slice_config.capacity if slice_config else "on-demand"
    labels = naming.labels(config.stack, slice_name=slice_config.name if slice_config else None)
    return container.NodePoolNodeConfigArgs(
        machine_type=machine_type,
        service_account=nodes,
        oauth_scopes=list(SCOPES),
        # Pods see their own account there, and not the node's.
        workload_metadata_config=container.NodePoolNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
        metadata={
            "disable-legacy-endpoints": "true",
            "block-project-ssh-keys": "TRUE",
            **({ATTEMPT: attempt} if attempt else {}),
        },
        shielded_instance_config=container.NodePoolNodeConfigShieldedInstanceConfigArgs(
            enable_secure_boot=True, enable_integrity_monitoring=True
        ),
        resource_labels={**(slice_config.labels if slice_config else {}), **labels},
        boot_disk_kms_key=slice_config.boot_disk_kms_key if slice_config else None,
        reservation_affinity=_reservation(config, slice_config) if slice_config else None,
        # Google shows nothing of what is not spot or flex-start.
        spot=True if capacity == "spot" else None,
        flex_start=True if capacity == "flex-start" else None,
        kubelet_config=container.NodePoolNodeConfigKubeletConfigArgs(
            shutdown_grace_period_seconds=SPOT_GRACE_S,
            shutdown_grace_period_critical_pods_seconds=SPOT_GRACE_OF_SYSTEM_S,
        )
        if capacity == "spot"
        else None,
    )


def _reservation(
    config: Config, slice_config: SliceConfig
) -> container.NodePoolNodeConfigReservationAffinityArgs | None:
    if slice_config.capacity == "flex-start":
        return container.NodePoolNodeConfigReservationAffinityArgs(consume_reservation_type="NO_RESERVATION")
    if slice_config.reservation is None:
        return None
    _, project, *_, name = slice_config.reservation.split("/")
    return container.NodePoolNodeConfigReservationAffinityArgs(
        consume_reservation_type="SPECIFIC_RESERVATION",
        key="compute.googleapis.com/reservation-name",
        values=[name if project == config.project else f"projects/{project}/reservations/{name}"],
    )
