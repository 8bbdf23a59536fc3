"""What happens to instances and groups in the simulated cloud.

A group in bulk mode waits until all of its machines can be had and makes them together. An instance that cannot be had
is refused, and gone, unless it is of flex-start, which waits as PENDING.
"""

import copy
import functools
from collections import Counter

from contracts.aliases import Json
from infra import catalogue
from rehearsal.simulated_cloud.capacity import ChipPool
from rehearsal.simulated_cloud.cloud import Cloud, Operation
from rehearsal.simulated_cloud.compute_records import ROOT, STOCK_OUT, Group, Instance, place
from rehearsal.simulator.api_error import ApiError, unready

TIERS = {"SPOT": "spot", "FLEX_START": "flex-start", "RESERVATION_BOUND": "reserved"}
RUNNING = ("STAGING", "RUNNING")


class ComputeLifecycle:
    """Everything that changes an instance or a group. cloud: whose lock guards it. templates, policies: by name."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.templates: dict[str, Json] = {}
        self.policies: dict[str, Json] = {}
        cloud.on_more_capacity.append(self._grant_capacity)

    # --- look -------------------------------------------------------------------------------------------------------

    def members(self, group: Group) -> list[Instance]:
        return [instance for instance in self.cloud.all(Instance) if instance.group == group.name]

    def _fits(self, pool: ChipPool, chips: int) -> bool:
        return self.cloud.has_room(Counter({pool: chips}))

    def _is_there(self, instance: Instance, *statuses: str) -> bool:
        """Whether it is still there, with one of these statuses."""
        return self.cloud.holds(instance) and instance.status in statuses

    # --- the changes through which all others go --------------------------------------------------------------------

    def _move(self, instance: Instance, status: str) -> None:
        instance.status = status
        if status == "RUNNING":
            instance.boot(self.cloud.hardware)
        elif status == "TERMINATED":
            self.cloud.give_back(instance)
        self.cloud.record(instance, status)

    def _move_topology(self, group: Group, state: str, *, phase: str = "standing") -> None:
        group.phase, group.topology = phase, state
        self.cloud.record(group, state)

    def _start(self, instance: Instance) -> None:
        """Give an instance its chips, and have it boot."""
        self.cloud.take(instance, Counter({instance.pool: instance.chips}))
        self._move(instance, "STAGING")

        def running() -> None:
            if self._is_there(instance, "STAGING"):
                self._move(instance, "RUNNING")
                self.cloud.end(instance.operation, {})
                duration = instance.properties.get("scheduling", {}).get("maxRunDuration")
                if duration is not None:
                    run_s = float(duration["seconds"])
                    instance.ends = self.cloud.moment + run_s
                    self.cloud.after(run_s, lambda: self._lose_instance(instance))
                self._connect(instance)

        self.cloud.after(self.cloud.delays.create_s, running)

    def _connect(self, instance: Instance) -> None:
        """The last machine of a group that runs makes its topology whole."""
        group = self._group(instance)
        if group is None or group.phase != "creating":
            return
        members = self.members(group)
        if len(members) == group.size and all(member.status == "RUNNING" for member in members):
            group.phase, group.topology = "standing", "ACTIVATING"
            self._activate_after(self.cloud.delays.operation_s, group)

    def _activate_after(self, seconds: float, group: Group) -> None:
        """Its topology is ACTIVE after a while, unless something else happens to it before."""
        before = group.topology

        def activate() -> None:
            if self.cloud.holds(group) and group.topology == before:
                self._move_topology(group, "ACTIVE")

        self.cloud.after(seconds, activate)

    def _group(self, instance: Instance) -> Group | None:
        group = self.cloud.things.get(instance.group or "")
        return group if isinstance(group, Group) else None

    # --- instances --------------------------------------------------------------------------------------------------

    def insert_instance(self, instance: Instance) -> Operation:
        cloud = self.cloud
        instance.operation = operation = cloud.begin(instance.name, "insert")
        cloud.add(instance, instance.status)

        def allocate() -> None:
            if not self._is_there(instance, "PROVISIONING"):
                return
            if self._fits(instance.pool, instance.chips):
                self._start(instance)
            elif instance.pool.tier == "flex-start":
                self._move(instance, "PENDING")
                if instance.valid_s is not None:
                    cloud.after(instance.valid_s, expired)
            else:
                refused()

        def refused() -> None:
            cloud.end(operation, _stock_out(instance.pool))
            cloud.drop(instance)

        def expired() -> None:
            if self._is_there(instance, "PENDING"):
                refused()

        cloud.after(cloud.delays.place_s, allocate)
        return operation

    def delete_instance(self, instance: Instance) -> Operation:
        if instance.status == "STOPPING":
            raise unready(instance.name, instance.status, "it is being deleted")
        operation = self.cloud.begin(instance.name, "delete")
        self.cloud.record(instance, "DELETING")
        self._move(instance, "STOPPING")

        def finish() -> None:
            self.cloud.drop(instance)
            self.cloud.end(operation, {})

        self.cloud.after(self.cloud.delays.delete_s, finish)
        return operation

    def change(self, thing: Instance | Group, changes: Json) -> Operation:
        """Other properties, once the operation is done."""
        operation = self.cloud.begin(thing.name, "update")

        def changed() -> None:
            if self.cloud.holds(thing):
                (thing.properties if isinstance(thing, Instance) else thing.body).update(changes)
            self.cloud.end(operation, {})

        self.cloud.after(self.cloud.delays.operation_s, changed)
        return operation

    # --- groups -----------------------------------------------------------------------------------------------------

    def insert_group(self, group: Group) -> Operation:
        """The operation is over once there is the group, long before it has its machines."""
        operation = self.cloud.begin(group.name, "insert")
        self.cloud.add(group, "WAITING")
        self.cloud.after(self.cloud.delays.operation_s, lambda: self.cloud.end(operation, {}))
        self.cloud.after(self.cloud.delays.place_s, self._grant_capacity)
        return operation

    def _grant_capacity(self) -> None:
        """Serve what waits and fits, the oldest first."""
        for instance in self.cloud.all(Instance):
            if instance.status == "PENDING" and self._fits(instance.pool, instance.chips):
                self._start(instance)
        for group in self.cloud.all(Group):
            if group.phase != "waiting" or self.cloud.moment < group.created + self.cloud.delays.place_s:
                continue
            if self._fits(group.pool, group.chips * group.size):
                self._create_members(group)
            else:
                group.trouble = _stock_out(group.pool)

    def _create_members(self, group: Group) -> None:
        group.phase, group.trouble = "creating", None
        template = self.templates[group.body["instanceTemplate"].removeprefix(ROOT)]
        more = group.body.get("allInstancesConfig", {}).get("properties", {})
        for worker in range(group.size):
            properties = copy.deepcopy(template["properties"])
            properties["labels"] = {**properties.get("labels", {}), **more.get("labels", {})}
            instance = Instance(
                name=f"{place(group.name)}/instances/{group.instance_name(worker)}",
                properties=properties,
                pool=group.pool,
                chips=group.chips,
                number=self.cloud.number(),
                created=self.cloud.moment,
                group=group.name,
                worker=worker,
            )
            self.cloud.add(instance, instance.status)
            self._start(instance)

    def delete_group(self, group: Group) -> Operation:
        if group.phase == "deleting":
            raise unready(group.name, "deleting", "it is being deleted")
        operation = self.cloud.begin(group.name, "delete")
        group.phase, group.topology = "deleting", "DEACTIVATING"
        self.cloud.record(group, "DELETING")
        for instance in self.members(group):
            self._move(instance, "STOPPING")

        def finish() -> None:
            self.vanish(group)
            self.cloud.end(operation, {})

        self.cloud.after(self.cloud.delays.delete_s, finish)
        return operation

    # --- what befalls them ------------------------------------------------------------------------------------------

    def lose(self, thing: Instance | Group) -> None:
        """The service takes an instance, or all of a group. Raises ApiError where nothing of it runs."""
        instances = [thing] if isinstance(thing, Instance) else self.members(thing)
        running = [instance for instance in instances if instance.status in RUNNING]
        if not running:
            raise unready(thing.name, "without machines", "nothing of it runs")
        for instance in running:
            self._lose_instance(instance)

    def _lose_instance(self, instance: Instance) -> None:
        """The service takes an instance: it is stopped, or deleted if its scheduling says so."""
        if not self._is_there(instance, *RUNNING):
            return
        if (group := self._group(instance)) is not None:
            self._move_topology(group, "INCOMPLETE")
        is_deleted = instance.properties.get("scheduling", {}).get("instanceTerminationAction") == "DELETE"
        self._move(instance, "STOPPING")

        def stopped() -> None:
            if self.cloud.holds(instance):
                if is_deleted:
                    self.cloud.drop(instance)
                else:
                    self._move(instance, "TERMINATED")

        self.cloud.after(self.cloud.delays.suspend_s, stopped)

    def vanish(self, thing: Instance | Group) -> None:
        """An instance, or a group with its instances, is gone at once."""
        if isinstance(thing, Instance):
            # Its group makes no other one, also where it was still making its machines.
            if (group := self._group(thing)) is not None:
                self._move_topology(group, "INCOMPLETE")
            self.cloud.drop(thing)
        elif self.cloud.holds(thing):
            for instance in self.members(thing):
                self.cloud.drop(instance)
            self.cloud.drop(thing)

    def repair(self, group: Group, seconds: float) -> None:
        """A host has failed: Google starts the slice again on healthy hosts. Raises ApiError where it is not ACTIVE."""
        if group.topology != "ACTIVE":
            raise unready(group.name, group.topology, "it would have to be ACTIVE")
        self._move_topology(group, "REACTIVATING", phase=group.phase)
        self._activate_after(seconds, group)

    def fail(self, group: Group) -> None:
        """Its topology has failed for good."""
        self._move_topology(group, "FAILED")


def _stock_out(pool: ChipPool) -> ApiError:
    """The error of what cannot be had, in the API's words."""
    return ApiError(
        STOCK_OUT,
        f"The zone '{pool.zone}' does not have enough resources available to fulfill the request."
        " '(resource type:compute)'.",
    )


REFUSED = ("ct4p", "ct5lp")
"""Families of machines with TPUs that Compute Engine makes for GKE only."""


@functools.cache
def families() -> dict[str, str]:
    """The families of machines with TPUs that it makes, and the catalogue's prefixes of types: ct6e to v6e."""
    prefixes = {
        generation.nodes.prefix.partition("-")[0]: generation.type_prefix
        for generation in catalogue.GENERATIONS
        if generation.nodes is not None
    }
    return {family: prefix for family, prefix in prefixes.items() if family not in REFUSED}


def tpu_of(properties: Json, zone: str) -> tuple[ChipPool, int]:
    """The pool of the chips of an instance, and how many it has. Raises ApiError for a machine without TPUs."""
    machine_type = str(properties.get("machineType", "")).rpartition("/")[2]
    family, number = machine_type.partition("-")[0], machine_type.rpartition("-")[2].removesuffix("t")
    if family in REFUSED:
        message = f"This user agent is not allowed to use the machine type [{machine_type}]"
        raise ApiError("INVALID_ARGUMENT", message)
    prefix = families().get(family)
    if prefix is None or not number.isdecimal():
        raise ApiError("INVALID_ARGUMENT", f"'{machine_type}' is no machine type with TPUs of this simulator")
    scheduling = properties.get("scheduling", {})
    affinity = properties.get("reservationAffinity", {}).get("consumeReservationType")
    tier = TIERS.get(scheduling.get("provisioningModel", ""), "on-demand")
    tier = "reserved" if affinity == "SPECIFIC_RESERVATION" else tier
    return ChipPool(zone=zone, prefix=prefix, tier=tier), int(number)
