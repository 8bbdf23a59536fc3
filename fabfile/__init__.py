"""The commands: `fab --list`. Each task reads, asks launch, and reports; what it needs is imported when it runs.

It may import launch (inside the tasks, so that `fab --list` answers at once); nothing imports it.
"""

from fabfile.order import in_order
from fabfile.tasks import accelerators, jobs, logs, runs, status, stop, train

namespace = in_order(train, status, logs, stop, runs, jobs, accelerators)
