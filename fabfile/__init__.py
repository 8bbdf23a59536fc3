"""The commands: `fab --list`. Each task reads, asks launch, and reports; what it needs is imported when it runs.

It may import launch (inside the tasks, so that `fab --list` answers at once); nothing imports it.
"""

import sys

from invoke.collection import Collection

from fabfile.care import deploy, doctor, trust, verify
from fabfile.imaging import build, images, push
from fabfile.program import main
from fabfile.reaching import get, jupyter, put, run, ssh, ssh_config
from fabfile.rehearsing import rehearsal
from fabfile.tasks import accelerators, fill_mask, jobs, logs, recover, runs, status, stop, train

namespace = Collection()
"""In the order in which a user meets them, which `fab --list` keeps."""
for command in (
    *(train, status, logs, stop, recover, runs, fill_mask, jobs),
    *(deploy, verify, doctor, trust, run, put, get, ssh, ssh_config, jupyter),
    *(build, push, images),
    *(rehearsal, accelerators),
):
    namespace.add_task(command)

# Fabric's own `fab` (`python -m fabric`) has found this file: it hands over to ours, which knows `--` and -h.
if hasattr(getattr(sys.modules.get("fabric.main"), "program", None), "core"):
    main()
