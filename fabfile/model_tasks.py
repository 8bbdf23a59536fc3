"""The tasks that use what a run has trained."""

from __future__ import annotations

import dataclasses

from contracts.errors import RequestError
from fabfile.command import task
from fabfile.command_options import argument, flag, group, option, options, port, positionals
from fabfile.selector import JSON, RUN, Selector

DONE_RUN = RUN + "; latest:JOB: the latest of a job that is done"


@options
class Predict:
    run: str = argument(DONE_RUN)
    second: str | None = option(
        "the second text of a pair, or what the questions are about (@FILE: the text of a file)"
    )
    json: bool = flag(JSON)
    selector: Selector = group(Selector, "stack", "slice", "runs")
    inputs: tuple[str, ...] = positionals(
        "INPUT …", needs="INPUT (a text, a question, or the path of a picture)"
    )


@task('fab predict latest "The <mask> of the list."')
def predict(args: Predict) -> int:
    """Let a run's model answer: texts, pairs, questions or pictures.

    An INPUT is a text, a question, or the path of a picture; @FILE: each line of a file is an input.
    """
    from console.models import answers

    return answers.predict(
        args.selector.target(), args.run, args.inputs, second=args.second, as_json=args.json
    )


@options
class Serve:
    run: str = argument(f"{DONE_RUN}; a server that runs: leads to it")
    address: str | None = option(
        "where to listen on this machine (default: 127.0.0.1; others need the token that is made)"
    )
    port: int | None = option("the port on this machine (default: 8000; 0: a free one)", port)
    token_file: str | None = option(
        "a file with the token that requests have to name (default: none on 127.0.0.1)"
    )
    image: bool = flag("in the framework's image, with Docker")
    detach: bool = flag("return when the server has started")
    selector: Selector = group(
        Selector, hosts="which host, by index (default: the first)", python="the interpreter on the host"
    )
    positionals: tuple[str, ...] = positionals("[-- OPTIONS OF THE SERVER]", owner="server")


@task("fab serve latest --port 8000")
def serve(args: Serve) -> int:
    """Answer with a run's model over HTTP, until Ctrl-C.

    On a stack, it runs on one host and is reached through a tunnel. The server's own options come after --.
    """
    from console import status as status_command
    from console.models import serving
    from launch import jobs

    if {"-h", "--help"} & {*args.positionals}:
        return status_command.list_jobs(jobs.SERVER)
    default_hosts = "1" if args.selector.stack_name == "local" else "0"
    target = dataclasses.replace(args.selector, hosts=args.selector.hosts or default_hosts).target()
    if len(target.hosts) > 1:
        raise RequestError(f"--hosts {args.selector.hosts}: a server is one process on one host; name one")
    server_options = serving.Options(
        address=args.address,
        port=args.port,
        token_file=args.token_file,
        in_image=args.image,
        detach=args.detach,
        server_arguments=args.positionals,
    )
    return serving.serve(target, args.run, server_options)


@options
class Export:
    run: str = argument(DONE_RUN)
    to: str | None = option("a folder of this machine, or a URL such as gs://…")
    force: bool = flag("replace an export that is there")
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab export latest --to exported/")
def export(args: Export) -> int:
    """Copy a run's model, with a model card for the Hugging Face Hub."""
    from console.models import hub_export

    if not args.to:
        raise RequestError("--to: say where to, a folder or a URL such as gs://…")
    return hub_export.export(args.selector.target(), args.run, args.to, force=args.force)
