"""The types that the stand-in can make: their ids, which inputs change in place, what Google fills in.

From the provider's public reference (registry pages of gcp), for the types and inputs that infra uses; an input changes
in place if it is not marked "Changing this forces a new resource" there. What is secret is what the schema of the
bridged Terraform provider (terraform-provider-google-beta, google-beta/services, August 2026) marks `Sensitive`, of the
properties that infra's resources have; secrets that the Python SDK adds by itself are the SDK's. A type that is not
here is refused by name."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

from contracts.aliases import Json

Fill = Callable[[Json, int], Json]

COMPUTE = "https://www.googleapis.com/compute/v1/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResourceKind:
    """id: a template of the inputs. in_place: inputs, or paths in them, that an update takes; any other makes the
    resource again.

    grows: of in_place, those that are made again when they get smaller. fill: (inputs, a number that is nobody else's)
    to what Google adds. names_itself: the provider can choose the name. sorted_by: of an input that is a list of
    objects, the field by which Google returns it sorted. secrets: paths of outputs that the provider marks as secret.
    is_replaceable: creating one that exists replaces it: a line of a policy, an object of a bucket.
    computed: inputs that Google fills in where they are left out, so that leaving one out is no change. completed:
    inputs that are objects, in which Google fills in more.
    """

    id: str
    in_place: str = ""
    grows: str = ""
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fill: Fill = lambda _inputs, _number: {}
    names_itself: bool = False
    sorted_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: str = ""
    computed: str = ""
    completed: str = ""
    is_replaceable: bool = False

    def replaces(self, name: str, old: object, new: object) -> bool:
        """Whether this change of an input makes the resource again."""
        if name in self.grows.split() and isinstance(old, int | float) and isinstance(new, int | float):
            return new < old
        inner = {path.partition(".")[2] for path in self.in_place.split() if path.startswith(f"{name}.")}
        if inner and isinstance(old, Mapping) and isinstance(new, Mapping):
            return any(old.get(key) != new.get(key) for key in {**old, **new} if key not in inner)
        return name not in self.in_place.split()

    def resource_id(self, inputs: Mapping[str, Any]) -> str:
        """The id that Google and the provider know a resource by. Raises KeyError for an input that is missing."""
        # A binding with a condition is another than the same without.
        condition = f"/{inputs['condition']['title']}" if inputs.get("condition") else ""
        return self.id.format_map({name: _last(str(value)) for name, value in inputs.items()}) + condition

    def as_kept(self, inputs: Json) -> Json:
        """The inputs as Google returns them."""
        lists = {name: field for name, field in self.sorted_by.items() if inputs.get(name)}
        return inputs | {
            name: sorted(inputs[name], key=lambda item: item[field]) for name, field in lists.items()
        }

    def outputs(self, own_id: str, inputs: Json, number: int, address_range: str) -> Json:
        """The outputs of a resource: its inputs, defaults, and what Google adds."""
        added = self.fill(inputs | {"id": own_id, "addressRange": address_range}, number)
        filled = dict(self.defaults) | inputs | added
        if self.id.startswith("projects/{project}/") and "selfLink" not in filled:
            filled["selfLink"] = COMPUTE + own_id
        return filled | label_outputs(inputs)


def label_outputs(inputs: Mapping[str, Any]) -> Json:
    """The label outputs: the provider adds a label of its own."""
    if inputs.get("labels") is None:
        return {}
    effective = {**inputs["labels"], "goog-pulumi-provisioned": "true"}
    return {"effectiveLabels": effective, "pulumiLabels": effective}


def _last(value: str) -> str:
    """A name, of a name or of a link to it: projects/p/regions/r/routers/n is n."""
    return value.rpartition("/")[2] if re.match(r"(https://[^/]+/.*|projects/.+)", value) else value


def _disk(inputs: Json, number: int) -> Json:
    return {"diskId": str(number), "users": [], "size": inputs.get("size", 10)}


def _instance(inputs: Json, number: int) -> Json:
    google_fields = {"networkIp": _address_in(inputs["addressRange"], number), "stackType": "IPV4_ONLY"}
    interfaces = [
        google_fields | {"name": f"nic{index}"} | interface
        for index, interface in enumerate(inputs["networkInterfaces"])
    ]
    return {"instanceId": str(number), "currentStatus": "RUNNING", "networkInterfaces": interfaces}


def _address(inputs: Json, number: int) -> Json:
    return {"address": _address_in(inputs["addressRange"], number), "purpose": "GCE_ENDPOINT"}


def _account(inputs: Json, number: int) -> Json:
    email = f"{inputs['accountId']}@{inputs['project']}.iam.gserviceaccount.com"
    name = f"projects/{inputs['project']}/serviceAccounts/{email}"
    return {"email": email, "member": f"serviceAccount:{email}", "name": name, "uniqueId": f"1{number:020d}"}


def _bucket(inputs: Json, _number: int) -> Json:
    link = f"https://www.googleapis.com/storage/v1/b/{inputs['name']}"
    location = str(inputs["location"]).upper()
    return {"url": f"gs://{inputs['name']}", "selfLink": link, "location": location, "projectNumber": 1}


def _repository(inputs: Json, _number: int) -> Json:
    path = f"{inputs['project']}/{inputs['repositoryId']}"
    return {"name": inputs["repositoryId"], "registryUri": f"{inputs['location']}-docker.pkg.dev/{path}"}


def _filestore(inputs: Json, number: int) -> Json:
    address = f"10.126.{number % 250}.2"
    networks = [
        {"connectMode": "DIRECT_PEERING"} | network | {"ipAddresses": [address]}
        for network in inputs["networks"]
    ]
    return {"networks": networks, "createTime": "2026-01-01T00:00:00Z"}


def _cluster(inputs: Json, number: int) -> Json:
    """Google fills in both endpoints, whichever is open, and a certificate authority."""
    endpoints = inputs.get("controlPlaneEndpointsConfig") or {}
    name = f"gke-{number:012x}-1.{inputs['location'].rpartition('-')[0]}.gke.goog"
    return {
        "endpoint": f"10.127.0.{number % 250}",
        "controlPlaneEndpointsConfig": endpoints
        | {"dnsEndpointConfig": (endpoints.get("dnsEndpointConfig") or {}) | {"endpoint": name}},
        "masterAuth": (inputs.get("masterAuth") or {})
        | {"clusterCaCertificate": "c3RhbmQtaW4=", "clientCertificate": "", "clientKey": ""},
        "masterVersion": "1.35.4-gke.1000000",
    }


def _pool(inputs: Json, _number: int) -> Json:
    count = inputs.get("nodeCount") or inputs.get("initialNodeCount") or 0
    return {"version": "1.35.4-gke.1000000", "nodeCount": count, "initialNodeCount": count}


def _member(resource: str) -> ResourceKind:
    return ResourceKind(
        id=f"{resource}/{{role}}/{{member}}",
        fill=lambda _inputs, number: {"etag": f"BwY{number:09d}="},
        is_replaceable=True,
    )


_CLUSTER = "projects/{project}/locations/{location}/clusters/{cluster}"
_REGION = "projects/{project}/regions/{region}"
_ZONE = "projects/{project}/zones/{zone}"
_PLACE = "projects/{project}/locations/{location}"

KINDS: Mapping[str, ResourceKind] = {
    "gcp:compute/network:Network": ResourceKind(
        id="projects/{project}/global/networks/{name}",
        names_itself=True,
        defaults={"autoCreateSubnetworks": True, "mtu": 1460, "routingMode": "REGIONAL"},
        fill=lambda _inputs, number: {"networkId": str(number), "gatewayIpv4": ""},
    ),
    "gcp:compute/subnetwork:Subnetwork": ResourceKind(
        id=f"{_REGION}/subnetworks/{{name}}",
        names_itself=True,
        in_place="privateIpGoogleAccess",
        defaults={"purpose": "PRIVATE", "stackType": "IPV4_ONLY"},
        fill=lambda inputs, number: {"subnetworkId": number, "gatewayAddress": _first(inputs["ipCidrRange"])},
    ),
    "gcp:compute/router:Router": ResourceKind(id=f"{_REGION}/routers/{{name}}", names_itself=True),
    "gcp:compute/routerNat:RouterNat": ResourceKind(
        id="{project}/{region}/{router}/{name}",
        names_itself=True,
        in_place="natIpAllocateOption sourceSubnetworkIpRangesToNat logConfig minPortsPerVm maxPortsPerVm "
        "enableDynamicPortAllocation enableEndpointIndependentMapping",
        defaults={"endpointTypes": ["ENDPOINT_TYPE_VM"], "type": "PUBLIC"},
    ),
    "gcp:compute/firewall:Firewall": ResourceKind(
        id="projects/{project}/global/firewalls/{name}",
        names_itself=True,
        in_place="allows description sourceRanges sourceTags targetTags",
        defaults={"direction": "INGRESS", "priority": 1000},
    ),
    "gcp:compute/address:Address": ResourceKind(
        id=f"{_REGION}/addresses/{{name}}", names_itself=True, in_place="labels", fill=_address
    ),
    "gcp:compute/disk:Disk": ResourceKind(
        id=f"{_ZONE}/disks/{{name}}",
        names_itself=True,
        in_place="labels size",
        grows="size",
        defaults={"type": "pd-standard", "physicalBlockSizeBytes": 4096},
        fill=_disk,
    ),
    "gcp:compute/instance:Instance": ResourceKind(
        id=f"{_ZONE}/instances/{{name}}",
        names_itself=True,
        in_place="labels metadata tags machineType attachedDisks shieldedInstanceConfig allowStoppingForUpdate "
        "serviceAccount",
        defaults={"canIpForward": False, "deletionProtection": False},
        fill=_instance,
    ),
    "gcp:storage/bucket:Bucket": ResourceKind(
        id="{name}",
        names_itself=True,
        in_place="forceDestroy labels lifecycleRules publicAccessPrevention softDeletePolicy storageClass "
        "uniformBucketLevelAccess",
        fill=_bucket,
    ),
    "gcp:storage/bucketIAMMember:BucketIAMMember": _member("b/{bucket}"),
    "gcp:storage/bucketObject:BucketObject": ResourceKind(
        id="{bucket}-{name}",
        names_itself=True,
        in_place="content contentType",
        secrets="content",
        fill=lambda _inputs, number: {"generation": number},
        is_replaceable=True,
    ),
    "gcp:serviceaccount/account:Account": ResourceKind(
        id="projects/{project}/serviceAccounts/{accountId}@{project}.iam.gserviceaccount.com",
        in_place="displayName",
        fill=_account,
    ),
    "gcp:serviceaccount/iAMMember:IAMMember": _member("serviceAccounts/{serviceAccountId}"),
    "gcp:projects/service:Service": ResourceKind(id="{project}/{service}", in_place="disableOnDestroy"),
    "gcp:projects/iAMMember:IAMMember": _member("{project}"),
    "gcp:projects/iAMCustomRole:IAMCustomRole": ResourceKind(
        id="projects/{project}/roles/{roleId}",
        in_place="title description permissions",
        fill=lambda inputs, _number: {"name": inputs["id"], "deleted": False},
    ),
    "gcp:secretmanager/secretIamMember:SecretIamMember": _member("projects/{project}/secrets/{secretId}"),
    "gcp:artifactregistry/repository:Repository": ResourceKind(
        id=f"{_PLACE}/repositories/{{repositoryId}}",
        in_place="description labels cleanupPolicies cleanupPolicyDryRun",
        defaults={"mode": "STANDARD_REPOSITORY"},
        sorted_by={"cleanupPolicies": "id"},
        fill=_repository,
    ),
    "gcp:artifactregistry/repositoryIamMember:RepositoryIamMember": _member(
        f"{_PLACE}/repositories/{{repository}}"
    ),
    "gcp:compute/resourcePolicy:ResourcePolicy": ResourceKind(
        id=f"{_REGION}/resourcePolicies/{{name}}", names_itself=True
    ),
    "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate": ResourceKind(
        id=f"{_REGION}/instanceTemplates/{{name}}",
        names_itself=True,
        fill=lambda _inputs, number: {"metadataFingerprint": f"f{number}"},
    ),
    "gcp:container/cluster:Cluster": ResourceKind(
        id=f"{_PLACE}/clusters/{{name}}",
        names_itself=True,
        in_place="controlPlaneEndpointsConfig masterAuthorizedNetworksConfig releaseChannel workloadIdentityConfig "
        "resourceLabels deletionProtection removeDefaultNodePool",
        fill=_cluster,
        secrets="masterAuth.clientKey",
        completed="controlPlaneEndpointsConfig masterAuth",
    ),
    "gcp:container/nodePool:NodePool": ResourceKind(
        id=f"{_CLUSTER}/nodePools/{{name}}",
        names_itself=True,
        in_place="autoscaling management nodeConfig.resourceLabels nodeCount nodeLocations",
        computed="initialNodeCount nodeCount",
        fill=_pool,
    ),
    "gcp:filestore/instance:Instance": ResourceKind(
        id=f"{_PLACE}/instances/{{name}}",
        names_itself=True,
        in_place="description labels fileShares",
        completed="networks",
        fill=_filestore,
    ),
    # Made through the Cloud TPU API, not in the world file: tpu_vm.py.
    "gcp:tpu/v2Vm:V2Vm": ResourceKind(
        id="projects/{project}/locations/{zone}/nodes/{name}",
        names_itself=True,
        in_place="description dataDisks metadata tags labels",
    ),
}


def _address_in(ip_range: str, number: int) -> str:
    """An address that Google would assign from a range: not the first two, nor the last two."""
    network = ipaddress.ip_network(ip_range)
    return str(network[2 + number % (network.num_addresses - 4)])


def _first(ip_range: str) -> str:
    """10.1.0.0/24 to 10.1.0.1, which Google gives the gateway."""
    return re.sub(r"\d+/\d+$", "1", ip_range)
