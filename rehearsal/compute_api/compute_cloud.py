"""What happens to instances and groups in the simulated cloud, with the clock and the capacity of its other API.

A group in bulk mode waits until all of its machines can be had and makes them together. An instance that cannot be had
is refused, and gone, unless it is of flex-start, which waits as PENDING.
"""

import collections
import copy
import functools

from contracts.aliases import Json
from infra import catalogue
from rehearsal.compute_api.compute_resources import STOCK_OUT, Group, Instance, Operation
from rehearsal.simulator.api_error import ApiError, unready
from rehearsal.tpu_api.capacity import ChipPool
from rehearsal.tpu_api.cloud import Cloud, Entry

TIERS = {"SPOT": "spot", "FLEX_START": "flex-start", "RESERVATION_BOUND": "reserved"}
Thing = Instance | Group


class ComputeCloud:
    """The state of the simulated Compute Engine, and everything that changes it. cloud: whose lock guards it."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.instances: dict[str, Instance] = {}
        self.groups: dict[str, Group] = {}
        self.templates: dict[str, Json] = {}
        self.policies: dict[str, Json] = {}
        self.operations: dict[str, Operation] = {}
        cloud.other_holders.append(self._held)
        cloud.on_more_capacity.append(self._grant_capacity)

    # --- look -------------------------------------------------------------------------------------------------------

    def _held(self) -> collections.Counter[ChipPool]:
        total: collections.Counter[ChipPool] = collections.Counter()
        for instance in self.instances.values():
            if instance.placed:
                total[instance.pool] += instance.chips
        return total

    def members(self, group: Group) -> list[Instance]:
        return [instance for instance in self.instances.values() if instance.group == group.path]

    def _fits(self, pool: ChipPool, chips: int) -> bool:
        return self.cloud.has_room(collections.Counter({pool: chips}))

    def _is_there(self, thing: Thing) -> bool:
        things: dict[str, Instance] | dict[str, Group] = (
            self.instances if isinstance(thing, Instance) else self.groups
        )
        return things.get(thing.path) is thing

    # --- the changes through which all others go --------------------------------------------------------------------

    def begin(self, thing: Thing, verb: str) -> Operation:
        number = self.cloud.number()
        name = f"operation-{number:06d}"
        operation = Operation(
            name=name, zone=thing.zone, target=thing.path, verb=verb, number=number, created=self.cloud.moment
        )
        self.operations[f"{thing.zone}/operations/{name}"] = operation
        return operation

    def end(self, operation: Operation | None, error: tuple[str, str] | None = None) -> None:
        if operation is not None and not operation.is_done:
            operation.is_done, operation.error = True, error

    def _record(self, thing: Thing, state: str) -> None:
        self.cloud.journal.append(Entry(moment=self.cloud.moment, name=thing.path, state=state))

    def _move(self, instance: Instance, status: str) -> None:
        instance.status = status
        if status == "RUNNING":
            instance.boot(self.cloud.hardware)
            self.cloud.hardware.changed(instance, "READY")
        elif status in ("STOPPING", "TERMINATED"):
            self.cloud.hardware.changed(instance, "TERMINATED")
        if status == "TERMINATED":
            instance.placed = False
        self._record(instance, status)
        self.cloud.capacity_may_have_changed()

    def _drop(self, instance: Instance) -> None:
        if self._is_there(instance):
            del self.instances[instance.path]
            self.cloud.hardware.changed(instance, "gone")
            self._record(instance, "gone")
            self.end(instance.operation, ("RESOURCE_NOT_FOUND", f"'{instance.path}' was deleted meanwhile"))
            self.cloud.capacity_may_have_changed()

    def _add(self, instance: Instance) -> None:
        self.instances[instance.path] = instance
        self._record(instance, instance.status)

    def _start(self, instance: Instance) -> None:
        """Give an instance its chips, and have it boot."""
        instance.placed = True
        self._move(instance, "STAGING")

        def running() -> None:
            if self._is_there(instance) and instance.status == "STAGING":
                self._move(instance, "RUNNING")
                self.end(instance.operation)
                duration = instance.properties.get("scheduling", {}).get("maxRunDuration")
                if duration is not None:
                    run_s = float(duration["seconds"])
                    instance.ends = self.cloud.moment + run_s
                    self.cloud.after(run_s, lambda: self._take(instance))
                self._connect(instance)

        self.cloud.after(self.cloud.delays.create_s, running)

    def _connect(self, instance: Instance) -> None:
        """The last machine of a group that runs makes its topology whole."""
        group = self.groups.get(instance.group or "")
        if group is None or group.phase != "creating":
            return
        members = self.members(group)
        if len(members) == group.size and all(each.status == "RUNNING" for each in members):
            group.phase, group.topology = "standing", "ACTIVATING"

            def active() -> None:
                if self._is_there(group) and group.topology == "ACTIVATING":
                    group.topology = "ACTIVE"
                    self._record(group, "ACTIVE")

            self.cloud.after(self.cloud.delays.operation_s, active)

    # --- instances --------------------------------------------------------------------------------------------------

    def insert_instance(self, instance: Instance) -> Operation:
        instance.operation = operation = self.begin(instance, "insert")
        self._add(instance)

        def place() -> None:
            if not self._is_there(instance) or instance.status != "PROVISIONING":
                return
            if self._fits(instance.pool, instance.chips):
                self._start(instance)
            elif instance.pool.tier == "flex-start":
                self._move(instance, "PENDING")
                if instance.valid_s is not None:
                    self.cloud.after(instance.valid_s, expired)
            else:
                refused()

        def refused() -> None:
            self.end(operation, _stock_out(instance.pool))
            self._drop(instance)

        def expired() -> None:
            if self._is_there(instance) and instance.status == "PENDING":
                refused()

        self.cloud.after(self.cloud.delays.place_s, place)
        return operation

    def delete_instance(self, instance: Instance) -> Operation:
        if instance.status == "STOPPING":
            raise unready(instance.path, instance.status, "it is being deleted")
        operation = self.begin(instance, "delete")
        self._record(instance, "DELETING")
        self._move(instance, "STOPPING")

        def finish() -> None:
            self._drop(instance)
            self.end(operation)

        self.cloud.after(self.cloud.delays.delete_s, finish)
        return operation

    def change(self, thing: Thing, changes: Json) -> Operation:
        """Other properties, once the operation is done."""
        operation = self.begin(thing, "update")

        def changed() -> None:
            if self._is_there(thing):
                (thing.properties if isinstance(thing, Instance) else thing.body).update(changes)
            self.end(operation)

        self.cloud.after(self.cloud.delays.operation_s, changed)
        return operation

    # --- groups -----------------------------------------------------------------------------------------------------

    def insert_group(self, group: Group) -> Operation:
        """The operation is over once there is the group, long before it has its machines."""
        operation = self.begin(group, "insert")
        self.groups[group.path] = group
        self._record(group, "WAITING")
        self.cloud.after(self.cloud.delays.operation_s, lambda: self.end(operation))
        self.cloud.after(self.cloud.delays.place_s, self._grant_capacity)
        return operation

    def _grant_capacity(self) -> None:
        """Serve what waits and fits, the oldest first."""
        for instance in list(self.instances.values()):
            if instance.status == "PENDING" and self._fits(instance.pool, instance.chips):
                self._start(instance)
        for group in list(self.groups.values()):
            if group.phase != "waiting" or self.cloud.moment < group.created + self.cloud.delays.place_s:
                continue
            if self._fits(group.pool, group.chips * group.size):
                self._create_members(group)
            else:
                group.trouble = _stock_out(group.pool)

    def _create_members(self, group: Group) -> None:
        group.phase, group.trouble = "creating", None
        template = self.templates[
            group.body["instanceTemplate"].removeprefix("https://www.googleapis.com/compute/v1/")
        ]
        more = group.body.get("allInstancesConfig", {}).get("properties", {})
        for worker in range(group.size):
            properties = copy.deepcopy(template["properties"])
            properties["labels"] = {**properties.get("labels", {}), **more.get("labels", {})}
            instance = Instance(
                path=f"{group.zone}/instances/{group.instance_name(worker)}",
                properties=properties,
                pool=group.pool,
                chips=group.chips,
                number=self.cloud.number(),
                created=self.cloud.moment,
                group=group.path,
                worker=worker,
            )
            self._add(instance)
            self._start(instance)

    def delete_group(self, group: Group) -> Operation:
        if group.phase == "deleting":
            raise unready(group.path, "deleting", "it is being deleted")
        operation = self.begin(group, "delete")
        group.phase, group.topology = "deleting", "DEACTIVATING"
        self._record(group, "DELETING")
        for instance in self.members(group):
            self._move(instance, "STOPPING")

        def finish() -> None:
            self.drop_group(group)
            self.end(operation)

        self.cloud.after(self.cloud.delays.delete_s, finish)
        return operation

    def drop_group(self, group: Group) -> None:
        """A group is gone, with its instances."""
        if self._is_there(group):
            for instance in self.members(group):
                self._drop(instance)
            del self.groups[group.path]
            self._record(group, "gone")

    # --- what befalls them ------------------------------------------------------------------------------------------

    def _take(self, instance: Instance) -> None:
        """The service takes an instance: it is stopped, or deleted if its scheduling says so."""
        if not self._is_there(instance) or instance.status not in ("STAGING", "RUNNING"):
            return
        group = self.groups.get(instance.group or "")
        if group is not None:
            group.phase, group.topology = "standing", "INCOMPLETE"
            self._record(group, "INCOMPLETE")
        is_deleted = instance.properties.get("scheduling", {}).get("instanceTerminationAction") == "DELETE"
        self._move(instance, "STOPPING")

        def stopped() -> None:
            if self._is_there(instance):
                if is_deleted:
                    self._drop(instance)
                else:
                    self._move(instance, "TERMINATED")

        self.cloud.after(self.cloud.delays.suspend_s, stopped)

    def take(self, thing: Thing) -> None:
        """The service takes an instance, or all of a group. Raises ApiError where nothing of it runs."""
        instances = [thing] if isinstance(thing, Instance) else self.members(thing)
        running = [each for each in instances if each.status in ("STAGING", "RUNNING")]
        if not running:
            raise unready(thing.path, "without machines", "nothing of it runs")
        for instance in running:
            self._take(instance)

    def drop(self, thing: Thing) -> None:
        """Gone at once, as if someone else had deleted it."""
        if isinstance(thing, Group):
            self.drop_group(thing)
            return
        group = self.groups.get(thing.group or "")
        if group is not None:  # which makes no other one, also where it was still making its machines
            group.phase, group.topology = "standing", "INCOMPLETE"
            self._record(group, "INCOMPLETE")
        self._drop(thing)

    def reactivate(self, group: Group, seconds: float) -> None:
        """A host has failed: Google starts the slice again on healthy hosts. Raises ApiError where it is not ACTIVE."""
        if group.topology != "ACTIVE":
            raise unready(group.path, group.topology, "it would have to be ACTIVE")
        group.topology = "REACTIVATING"
        self._record(group, "REACTIVATING")

        def active() -> None:
            if self._is_there(group) and group.topology == "REACTIVATING":
                group.topology = "ACTIVE"
                self._record(group, "ACTIVE")

        self.cloud.after(seconds, active)

    def fail(self, group: Group) -> None:
        """Its topology has failed for good."""
        group.phase, group.topology = "standing", "FAILED"
        self._record(group, "FAILED")


def _stock_out(pool: ChipPool) -> tuple[str, str]:
    message = (
        f"The zone '{pool.zone}' does not have enough resources available to fulfill the request."
        " '(resource type:compute)'."
    )
    return STOCK_OUT, message


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
