"""The commands: `fab --list`. Each task reads, asks launch, and reports; what it needs is imported when it runs.

It may import launch (inside the tasks, so that `fab --list` answers at once); nothing imports it.
"""

from fabfile.care import deploy, doctor, verify
from fabfile.imaging import build, images, push
from fabfile.order import in_order
from fabfile.reaching import get, jupyter, put, run, ssh, ssh_config
from fabfile.rehearsing import rehearsal
from fabfile.tasks import accelerators, fill_mask, jobs, logs, recover, runs, status, stop, train

namespace = in_order(
    *(train, status, logs, stop, recover, runs, fill_mask, jobs),
    *(deploy, verify, doctor, run, put, get, ssh, ssh_config, jupyter),
    *(build, push, images),
    *(rehearsal, accelerators),
)
