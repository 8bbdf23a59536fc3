"""Hosts of the rehearsal: containers, each with its own address and sshd and the training environment inside. Those of
the kind "docker" have a Docker daemon of their own too, and an image registry beside them.

It imports docker and of ours `tools.go`; `rehearsal` and tests import it. PYTHON is the jobs' interpreter on the hosts,
TPU_STACK_BASE_IMAGE names another base for their image.

    require_base(os.environ, "plain")                      # in seconds: Docker answers, the base can be had
    with Machines(name="demo", say=print) as machines:     # Docker is asked; a guardian waits for this process's death
        image = machines.prepare()                         # the host image; minutes once, then nothing
        network = machines.network()                       # .subnet: give addresses out of it, but not those reserved
        storage = machines.storage(bucket="b")             # share and bucket server; .environment is for this machine
        machines.boot(Machine(name=…, address=…, …))       # returns when its sshd answers
        machines.kill("w-0"); machines.restart("w-0"); machines.remove("w-0"); machines.list()
        machines.faults.cut("w-0"); machines.faults.heal("w-0")
    # all is removed, as it is by remove_everything(name) in any process and by the guardian after a SIGKILL

What a rehearsal makes carries the label tpu-stack.rehearsal=<its name>. Methods may be called from several threads.
Every error is a MachinesError: what was asked, what Docker said, what to do.

Network     name, subnet, laptop_address (of this machine, in it), storage_address, registry_address;
            `.addresses(n)`: n free for machines
Registry    of machines.registry(), None without Docker. host: "127.0.0.1:PORT", with which the names of images begin,
            here and on every host
Storage     environment: what laptop commands need (STORAGE_EMULATOR_HOST, TENSORSTORE_GCS_HTTP_URL);
            hosts have the same by themselves. make_bucket(name), bucket_names()
Machine     name, address, host_key_private_pem (OpenSSH form), authorized_keys (lines), user ("sa_rehearsal"),
            environment (for every ssh session), share_mount ("/mnt/share"; None: no share)
Standing    name, address, state ("running" | "exited" | …), user, share_mount: one of list()
Faults      each with its undoing, all take the machine's name:
            cut/heal                    packets dropped both ways, nothing is told to anybody (loopback goes on)
            fill_disk/empty_disk        its home, where agent, cache and logs are, has no byte left
            fill_share/empty_share      the share, for all machines (any running one's name)
            set_clock(name, seconds)    new ssh connections see a clock that is off by so much; 0.0 undoes it
            hold_device/release_device  a process of the machine's user keeps DEVICE open; the pid is returned
            unmount_share/mount_share   the share's mount point is an empty folder
            break_python/mend_python    the interpreter PYTHON (or another path) is not there
            refuse_keys/accept_keys     sshd knows no public key of the user
            change_host_key/restore_host_key   sshd shows another key; the new public line is returned
            kill_docker/start_docker    its Docker daemon is gone
            wedge(name, pid=None)/unwedge(name, pid)   SIGSTOP to a pid, or to the job process that is newest; → the pid
"""

from rehearsal.machines.errors import MachinesError
from rehearsal.machines.faults import Faults
from rehearsal.machines.host_image import Kind, require_base
from rehearsal.machines.machine import DEVICE, PYTHON, Machine, Standing
from rehearsal.machines.machines import Machines
from rehearsal.machines.network import Network
from rehearsal.machines.registry import Registry
from rehearsal.machines.removal import remove_everything
from rehearsal.machines.storage import Storage

__all__ = [
    "DEVICE",
    "PYTHON",
    "Faults",
    "Kind",
    "Machine",
    "Machines",
    "MachinesError",
    "Network",
    "Registry",
    "Standing",
    "Storage",
    "remove_everything",
    "require_base",
]
