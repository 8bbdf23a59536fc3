"""Hosts of the rehearsal: containers, each with its own address and sshd and the training environment inside. Those of
the kind "docker" have a Docker daemon of their own too, and an image registry beside them.

    require_base(os.environ, "plain")                      # in seconds: Docker answers, the base can be fetched
    with Machines(name="demo", say=print) as machines:     # builds the image, minutes once; a guardian waits for this
        machines.network.addresses(4)                      # process's death; addresses that are free for machines
        machines.storage.make_bucket("b")                  # share and bucket server; .environment is for this machine
        machines.boot(Machine(name=…, address=…, …))       # returns when its sshd answers
        machines.kill("w-0"); machines.restart("w-0"); machines.remove("w-0"); machines.list()
        machines.faults.cut("w-0"); machines.faults.heal("w-0")
    # all is removed, as it is by guardian.remove_everything(name) in any process and by the guardian after a SIGKILL

What a rehearsal makes carries the label tpu-stack.rehearsal=<its name>. Methods may be called from several threads.
Every error is a MachinesError: what was asked, what Docker said, what to do.
"""
