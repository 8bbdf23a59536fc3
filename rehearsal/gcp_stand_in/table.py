"""The types that the stand-in can make: their ids, what of each changes in place, what Google fills in.

From the provider's public reference (registry pages of gcp) as far as infra uses it; what may change in place is
there what is not marked "Changing this forces a new resource". A type that is not here is refused by name."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

from infra.catalogue import zones
from rehearsal.gcp_stand_in.world import WorldError

Json = dict[str, Any]
Fill = Callable[[Json, int], Json]

COMPUTE = "https://www.googleapis.com/compute/v1/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """id: a template of the inputs. in_place: inputs that an update takes; any other makes the resource again.

    grows: of in_place, those that are made again when they get smaller. fill: (inputs, a number that is nobody else's)
    to what Google adds. guard: the input that has to be off for a deletion. sorted_by: of an input that is a list of
    objects, the field by which Google gives it back sorted.
    """

    id: str
    in_place: frozenset[str] = frozenset()
    grows: frozenset[str] = frozenset()
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fill: Fill = lambda _inputs, _number: {}
    guard: str | None = None
    names_itself: bool = False
    sorted_by: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def replaces(self, name: str, old: object, new: object) -> bool:
        """Whether this change of an input makes the resource again."""
        if name == "deletionPolicy":
            return False
        if name in self.grows and isinstance(old, int | float) and isinstance(new, int | float):
            return new < old
        return name not in self.in_place


def as_kept(kind: Kind, inputs: Json) -> Json:
    """The inputs as Google gives them back."""
    lists = {name: field for name, field in kind.sorted_by.items() if inputs.get(name)}
    return inputs | {
        name: sorted(inputs[name], key=lambda each: each[field]) for name, field in lists.items()
    }


def outputs_of(kind: Kind, own_id: str, inputs: Json, place: Json, number: int) -> Json:
    """What the engine is told of a resource: its inputs, defaults, and what Google adds.

    place: the inputs, and what else `fill` goes by."""
    filled = dict(kind.defaults) | inputs | kind.fill(place | {"id": own_id}, number)
    if kind.id.startswith("projects/{project}/") and "selfLink" not in filled:
        filled["selfLink"] = COMPUTE + own_id
    return filled | labels_of(inputs)


def labels_of(inputs: Mapping[str, Any]) -> Json:
    """The outputs about labels: the provider adds one of its own."""
    if inputs.get("labels") is None:
        return {}
    effective = {**inputs["labels"], "goog-pulumi-provisioned": "true"}
    return {"effectiveLabels": effective, "pulumiLabels": effective}


def id_of(kind: Kind, inputs: Mapping[str, Any]) -> str:
    """The id that Google and the provider know a resource by. Raises KeyError for an input that is missing."""
    return kind.id.format_map({name: _last(str(value)) for name, value in inputs.items()})


def _last(value: str) -> str:
    """A name, of a name or of a link to it: projects/p/regions/r/routers/n is n."""
    return value.rpartition("/")[2] if re.match(r"(https://[^/]+/.*|projects/.+)", value) else value


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _disk(inputs: Json, number: int) -> Json:
    return {"diskId": str(number), "users": [], "size": inputs.get("size", 10)}


def _instance(inputs: Json, number: int) -> Json:
    """Raises WorldError, in Compute Engine's words, for a machine type that its zone does not have."""
    zone, machine_type = inputs["zone"], inputs["machineType"].rpartition("/")[2]
    if zones.family_of(machine_type) not in zones.families_in(zone) or not zones.is_machine_type(
        machine_type
    ):
        link = f"projects/{inputs['project']}/zones/{zone}/machineTypes/{machine_type}"
        raise WorldError(
            f"Error creating instance: googleapi: Error 400: Invalid value for field 'resource.machineType': '{link}'. "
            f"Machine type with name '{machine_type}' does not exist in zone '{zone}'., invalid"
        )
    interfaces = [
        {
            "networkIp": _address_in(inputs["addressRange"], number),
            "name": f"nic{index}",
            "stackType": "IPV4_ONLY",
        }
        | interface
        | {
            "accessConfigs": [
                {"natIp": f"198.51.100.{number % 250 + 2}", "networkTier": "PREMIUM"} | access
                for access in interface.get("accessConfigs") or []
            ]
        }
        for index, interface in enumerate(inputs["networkInterfaces"])
    ]
    return {"instanceId": str(number), "currentStatus": "RUNNING", "networkInterfaces": interfaces}


def _address(inputs: Json, number: int) -> Json:
    if inputs.get("addressType") != "INTERNAL":
        return {
            "address": f"198.51.100.{number % 250 + 2}",
            "addressType": "EXTERNAL",
            "networkTier": "PREMIUM",
        }
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
        {"connectMode": "DIRECT_PEERING"} | each | {"ipAddresses": [address]} for each in inputs["networks"]
    ]
    return {"networks": networks, "createTime": "2026-01-01T00:00:00Z"}


def _etag(_inputs: Json, number: int) -> Json:
    return {"etag": f"BwY{number:09d}="}


def _member(of: str) -> Kind:
    return Kind(id=f"{of}/{{role}}/{{member}}", fill=_etag)


_REGION = "projects/{project}/regions/{region}"
_ZONE = "projects/{project}/zones/{zone}"
_PLACE = "projects/{project}/locations/{location}"

KINDS: Mapping[str, Kind] = {
    "gcp:compute/network:Network": Kind(
        id="projects/{project}/global/networks/{name}",
        names_itself=True,
        in_place=_names("routingMode networkFirewallPolicyEnforcementOrder"),
        defaults={
            "autoCreateSubnetworks": True,
            "mtu": 1460,
            "networkFirewallPolicyEnforcementOrder": "AFTER_CLASSIC_FIREWALL",
            "routingMode": "REGIONAL",
        },
        fill=lambda _inputs, number: {"networkId": str(number), "gatewayIpv4": ""},
    ),
    "gcp:compute/subnetwork:Subnetwork": Kind(
        id=f"{_REGION}/subnetworks/{{name}}",
        names_itself=True,
        in_place=_names(
            "privateIpGoogleAccess privateIpv6GoogleAccess logConfig secondaryIpRanges stackType"
        ),
        defaults={"purpose": "PRIVATE", "stackType": "IPV4_ONLY"},
        fill=lambda inputs, number: {"subnetworkId": number, "gatewayAddress": _first(inputs["ipCidrRange"])},
    ),
    "gcp:compute/router:Router": Kind(
        id=f"{_REGION}/routers/{{name}}", names_itself=True, in_place=_names("bgp description")
    ),
    "gcp:compute/routerNat:RouterNat": Kind(
        id="{project}/{region}/{router}/{name}",
        names_itself=True,
        in_place=_names(
            "natIpAllocateOption natIps drainNatIps rules logConfig minPortsPerVm "
            "sourceSubnetworkIpRangesToNat subnetworks maxPortsPerVm icmpIdleTimeoutSec "
            "enableDynamicPortAllocation enableEndpointIndependentMapping udpIdleTimeoutSec "
            "tcpEstablishedIdleTimeoutSec tcpTransitoryIdleTimeoutSec tcpTimeWaitTimeoutSec"
        ),
        defaults={
            "udpIdleTimeoutSec": 30,
            "icmpIdleTimeoutSec": 30,
            "tcpEstablishedIdleTimeoutSec": 1200,
            "tcpTransitoryIdleTimeoutSec": 30,
            "tcpTimeWaitTimeoutSec": 120,
            "endpointTypes": ["ENDPOINT_TYPE_VM"],
            "type": "PUBLIC",
        },
    ),
    "gcp:compute/firewall:Firewall": Kind(
        id="projects/{project}/global/firewalls/{name}",
        names_itself=True,
        in_place=_names(
            "allows denies description destinationRanges disabled logConfig priority sourceRanges "
            "sourceServiceAccounts sourceTags targetServiceAccounts targetTags"
        ),
        defaults={"direction": "INGRESS", "priority": 1000},
    ),
    "gcp:compute/address:Address": Kind(
        id=f"{_REGION}/addresses/{{name}}",
        names_itself=True,
        in_place=_names("labels"),
        fill=_address,
    ),
    "gcp:compute/disk:Disk": Kind(
        id=f"{_ZONE}/disks/{{name}}",
        names_itself=True,
        in_place=_names("labels size provisionedIops provisionedThroughput accessMode"),
        grows=_names("size"),
        defaults={"type": "pd-standard", "physicalBlockSizeBytes": 4096},
        fill=_disk,
    ),
    "gcp:compute/instance:Instance": Kind(
        id=f"{_ZONE}/instances/{{name}}",
        names_itself=True,
        in_place=_names(
            "labels metadata tags machineType serviceAccount attachedDisks scheduling "
            "deletionProtection shieldedInstanceConfig resourcePolicies desiredStatus "
            "allowStoppingForUpdate canIpForward minCpuPlatform"
        ),
        defaults={"canIpForward": False, "deletionProtection": False},
        fill=_instance,
        guard="deletionProtection",
    ),
    "gcp:compute/resourcePolicy:ResourcePolicy": Kind(
        id=f"{_REGION}/resourcePolicies/{{name}}", names_itself=True
    ),
    "gcp:compute/instanceIAMMember:InstanceIAMMember": _member(f"{_ZONE}/instances/{{instanceName}}"),
    "gcp:storage/bucket:Bucket": Kind(
        id="{name}",
        names_itself=True,
        in_place=_names(
            "autoclass cors defaultEventBasedHold encryption forceDestroy labels lifecycleRules "
            "logging publicAccessPrevention requesterPays retentionPolicy rpo softDeletePolicy "
            "storageClass uniformBucketLevelAccess versioning website"
        ),
        defaults={"storageClass": "STANDARD", "publicAccessPrevention": "inherited"},
        fill=_bucket,
    ),
    "gcp:storage/bucketIAMMember:BucketIAMMember": _member("b/{bucket}"),
    "gcp:serviceaccount/account:Account": Kind(
        id="projects/{project}/serviceAccounts/{accountId}@{project}.iam.gserviceaccount.com",
        in_place=_names("displayName description disabled"),
        fill=_account,
    ),
    "gcp:serviceaccount/iAMMember:IAMMember": _member("serviceAccounts/{serviceAccountId}"),
    "gcp:projects/service:Service": Kind(
        id="{project}/{service}",
        in_place=_names("disableOnDestroy disableDependentServices checkIfServiceHasUsageOnDestroy"),
    ),
    "gcp:projects/iAMMember:IAMMember": _member("{project}"),
    "gcp:iap/tunnelIamMember:TunnelIamMember": _member("projects/{project}/iap_tunnel"),
    "gcp:iap/tunnelInstanceIAMMember:TunnelInstanceIAMMember": _member(
        "projects/{project}/iap_tunnel/zones/{zone}/instances/{instance}"
    ),
    "gcp:artifactregistry/repository:Repository": Kind(
        id=f"{_PLACE}/repositories/{{repositoryId}}",
        in_place=_names(
            "description labels cleanupPolicies cleanupPolicyDryRun dockerConfig "
            "virtualRepositoryConfig vulnerabilityScanningConfig"
        ),
        defaults={"mode": "STANDARD_REPOSITORY"},
        sorted_by={"cleanupPolicies": "id"},
        fill=_repository,
    ),
    "gcp:artifactregistry/repositoryIamMember:RepositoryIamMember": _member(
        f"{_PLACE}/repositories/{{repository}}"
    ),
    "gcp:filestore/instance:Instance": Kind(
        id=f"{_PLACE}/instances/{{name}}",
        names_itself=True,
        in_place=_names(
            "description labels fileShares performanceConfig deletionProtectionEnabled "
            "deletionProtectionReason"
        ),
        fill=_filestore,
        guard="deletionProtectionEnabled",
    ),
    # Made through the Cloud TPU API, not in the world file: tpu_vm.py.
    "gcp:tpu/v2Vm:V2Vm": Kind(
        id="projects/{project}/locations/{zone}/nodes/{name}",
        names_itself=True,
        in_place=_names("description dataDisks metadata tags labels"),
    ),
}


def _address_in(ip_range: str, number: int) -> str:
    """One of the addresses that Google hands out of a range: not the first two, nor the last two."""
    network = ipaddress.ip_network(ip_range)
    return str(network[2 + number % (network.num_addresses - 4)])


def _first(ip_range: str) -> str:
    """10.1.0.0/24 to 10.1.0.1, which Google gives the gateway."""
    return re.sub(r"\d+/\d+$", "1", ip_range)
