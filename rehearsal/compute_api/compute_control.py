"""What befalls slices in the simulated Compute Engine without a request of its API."""

from contracts.aliases import Json
from rehearsal.compute_api.compute_cloud import ComputeCloud, Thing
from rehearsal.compute_api.compute_resources import Group
from rehearsal.tpu_api.control import named


class ComputeControl:
    """Names are paths (projects/…/zones/…/instances/…), or last parts that are nobody else's.

    Capacity, injected errors and the clock are the business of the cloud's `rehearsal.tpu_api.Control`. A thing that is
    not there, or whose state does not allow it, raises ApiError; a value without sense ValueError.
    """

    def __init__(self, cloud: ComputeCloud) -> None:
        self._cloud = cloud

    def preempt(self, name: str) -> None:
        """A spot instance, or the machines of a spot group, are taken back. Others than spot raise ValueError."""
        with self._cloud.cloud.settled():
            thing = self._thing(name)
            if thing.pool.tier != "spot":
                raise ValueError(
                    f"{thing.path} is {thing.pool.tier}: only spot is preempted; stop it instead"
                )
            self._cloud.take(thing)

    def stop(self, name: str) -> None:
        """Like `preempt` for any capacity, as when somebody stops it."""
        with self._cloud.cloud.settled():
            self._cloud.take(self._thing(name))

    def vanish(self, name: str) -> None:
        """Gone at once, as if someone else had deleted it."""
        with self._cloud.cloud.settled():
            self._cloud.drop(self._thing(name))

    def reactivate(self, name: str, seconds: float = 10.0) -> None:
        """A host of a group has failed, and Google restarts the slice."""
        with self._cloud.cloud.settled():
            self._cloud.reactivate(self._group(name), seconds)

    def fail(self, name: str) -> None:
        """The topology of a group fails for good."""
        with self._cloud.cloud.settled():
            self._cloud.fail(self._group(name))

    def alive(self) -> Json:
        """Everything that is there, by path: the state of groups, the status of instances."""
        with self._cloud.cloud.settled():
            return {
                "groups": {
                    path: group.topology if group.phase == "standing" else group.phase.upper()
                    for path, group in self._cloud.groups.items()
                },
                "instances": {path: each.status for path, each in self._cloud.instances.items()},
            }

    def slices(self) -> dict[str, str]:
        """The state of each group, and of each instance that is of none, by path."""
        with self._cloud.cloud.settled():
            single = {path: each.status for path, each in self._cloud.instances.items() if each.group is None}
        return {**self.alive()["groups"], **single}

    def _group(self, name: str) -> Group:
        thing = self._thing(name)
        if not isinstance(thing, Group):
            raise ValueError(f"{thing.path} is no group")
        return thing

    def _thing(self, name: str) -> Thing:
        things: dict[str, Thing] = {**self._cloud.instances, **self._cloud.groups}
        return named(name, things, "instance or group")
