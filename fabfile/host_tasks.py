"""The tasks about hosts: preparing and testing them, commands, files, shells and notebooks on them."""

from __future__ import annotations

from contracts.errors import RequestError
from fabfile.command import task
from fabfile.command_options import argument, flag, group, option, options, positionals, seconds, whole_number
from fabfile.selector import Selector
from fabfile.train_tasks import ACCESS, RUNTIME


@options
class Deploy:
    selector: Selector = group(
        Selector,
        "stack",
        "slice",
        "hosts",
        "python",
        python="the interpreter on the hosts, instead of one that deploy installs",
    )
    runtime: str | None = option(RUNTIME)
    comforts: bool = flag("install zsh, byobu and mosh as well")


@task("fab deploy --stack dev")
def deploy(args: Deploy) -> int:
    """Prepare every host for runs, and report changes."""
    from backends.vm import deploy as deployment

    target = args.selector.target().require("deploy")
    return deployment.deploy(target, with_comforts=args.comforts, runtime=args.runtime)


@options
class Verify:
    framework: str = option(
        "the framework whose devices and collectives are tested: jax, pytorch, …", default="jax"
    )
    selector: Selector = group(Selector, "stack", "slice", "hosts", "platform", "python")
    runtime: str | None = option(RUNTIME)
    container_access: str | None = option(ACCESS)


@task("fab verify --stack dev --framework jax")
def verify(args: Verify) -> int:
    """Test on all hosts: devices, a matmul, an all-reduce."""
    from console.hosts import verification as verification

    target = args.selector.target().require("verify")
    return verification.verify(target, args.framework, args.runtime, args.container_access)


@options
class Doctor:
    selector: Selector = group(Selector, "stack", "slice", "hosts")
    json: bool = flag("print every finding as JSON")
    first_day: bool = flag("print facts that only real hosts can provide, for a bug report")


@task("fab doctor --stack dev")
def doctor(args: Doctor) -> int:
    """Look for all problems, and print their remedies."""
    from console.doctor import doctor as visit

    if args.first_day:
        return visit.first_day(args.selector.target())
    return visit.doctor(
        args.selector.target, wants_stack=args.selector.stack_name != "local", as_json=args.json
    )


@options
class Trust:
    host: str | None = option("which hosts, such as 0 or 0-3,5 (default: all)")
    selector: Selector = group(Selector, "stack", "slice")
    instance: str | None = option("the name of the host's VM, if it has published none")
    fingerprint: str | None = option("the fingerprint SHA256:…, already compared; replaces the question")


@task("fab trust --stack dev --host 0")
def trust(args: Trust) -> int:
    """Show a host's SSH key, ask, and store it beside the inventory."""
    from backends.resolve import keys_file, resolve
    from console.hosts import trust as trusting

    request = args.selector.request()
    return trusting.trust(
        resolve(request).require("trust"),
        keys_file(request),
        hosts=args.host,
        instance=args.instance,
        fingerprint=args.fingerprint,
    )


@options
class Run:
    command: str = option("a line for the hosts' sh, instead of words after --", default="")
    selector: Selector = group(Selector, "stack", "slice", "hosts")
    group: bool = flag("print at the end, and print equal output of several hosts once")
    timeout: float | None = option("seconds after which the command is ended (default: none)", seconds(1))
    positionals: tuple[str, ...] = positionals("-- COMMAND …")


@task("fab run --stack dev -- df -h /")
def run(args: Run) -> int:
    """Run a command on all hosts: `fab run -- COMMAND …`."""
    from console.hosts import execute

    argv = execute.parse_command(args.positionals, args.command)
    return execute.run(
        args.selector.target().require("run"), argv, grouped=args.group, timeout_s=args.timeout
    )


@options
class Put:
    source: str = argument("a file or folder of this machine")
    target: str = argument(
        "the path on the hosts; an existing folder receives the copy, otherwise the copy gets this name"
    )
    selector: Selector = group(Selector, "stack", "slice", "hosts")
    force: bool = flag("replace an existing folder")


@task("fab put corpus.txt /mnt/share/ --stack dev")
def put(args: Put) -> int:
    """Copy a file or folder to all hosts."""
    from console.hosts import copies

    return copies.put(args.selector.target().require("put"), args.source, args.target, force=args.force)


@options
class Get:
    source: str = argument("a file or folder of the hosts")
    target: str = argument("the path on this machine; several hosts each get a folder with their index in it")
    selector: Selector = group(Selector, "stack", "slice", "hosts")
    force: bool = flag("replace an existing folder")


@task("fab get /tmp/tpu_logs logs --stack dev")
def get(args: Get) -> int:
    """Copy a file or folder from all hosts."""
    from console.hosts import copies

    return copies.get(args.selector.target().require("get"), args.source, args.target, force=args.force)


@options
class Ssh:
    host: int | None = option(
        "which host, by index, of the slice or of the run (default: the first)", whole_number(0)
    )
    selector: Selector = group(Selector, "stack", "slice", "hosts", "runs")
    run: str | None = argument(
        "a run: the shell is where it runs, in its container or pod, with its variables but for secrets "
        "(default: on the host itself; in a cluster the run that is active)",
        default=None,
    )


@task("fab ssh --stack dev --host 0", "fab ssh latest --host 1")
def ssh(args: Ssh) -> int:
    """Open a shell on a host, or where a run runs."""
    from console.hosts import shells

    if args.run and args.run.isdigit() and len(args.run) < 4:
        raise RequestError(f"{args.run}: is the index of a host, and no run; write --host {args.run}")

    return shells.open_shell(args.selector.target(), args.host, args.run)


@options
class SshConfig:
    selector: Selector = group(Selector, "stack", "slice", "hosts")
    write: bool = flag("write it to ~/.ssh, where ssh and VS Code find it")


@task("fab ssh-config --stack dev --write")
def ssh_config(args: SshConfig) -> int:
    """Print a configuration of the hosts for ssh and VS Code."""
    from backends.vm import ssh_config as configuration

    return configuration.show_config(args.selector.target().require("ssh-config"), write=args.write)


@options
class Jupyter:
    selector: Selector = group(
        Selector, "stack", "slice", "hosts", "python", python="the interpreter on the host"
    )
    module: str = option("the server's Python module", default="jupyterlab")
    browser: bool = flag("open the notebooks in a browser on this machine")


@task("fab jupyter --stack dev --browser")
def jupyter(args: Jupyter) -> int:
    """Serve notebooks from the first host, for this machine only."""
    from console.hosts import notebook

    return notebook.serve(args.selector.target().require("jupyter"), args.module, browser=args.browser)
