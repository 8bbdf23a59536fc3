"""The tasks that use what a run has trained."""

from __future__ import annotations

import dataclasses

from contracts.errors import RequestError
from fabfile.command import task
from fabfile.options import argument, flag, group, option, options, port, words
from fabfile.where import JSON, RUN, Where

DONE_RUN = RUN + "; latest:JOB: the latest of a job that is done"


@options
class Predict:
    run: str = argument(DONE_RUN)
    second: str | None = option(
        "the second text of a pair, or what the questions are about (@FILE: the text of a file)"
    )
    json: bool = flag(JSON)
    where: Where = group(Where, "stack", "slice", "runs")
    inputs: tuple[str, ...] = words("INPUT …", needs="INPUT (a text, a question, or the path of a picture)")


@task('fab predict latest "The <mask> of the list."')
def predict(args: Predict) -> int:
    """Let a run's model answer: texts, pairs, questions or pictures.

    An INPUT is a text, a question, or the path of a picture; @FILE: each line of a file is an input.
    """
    from console import predict

    return predict.predict(args.where.target(), args.run, args.inputs, second=args.second, as_json=args.json)


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
    where: Where = group(
        Where, hosts="which host, by index (default: the first)", python="the interpreter on the host"
    )
    words: tuple[str, ...] = words("[-- OPTIONS OF THE SERVER]", of="server")


@task("fab serve latest --port 8000")
def serve(args: Serve) -> int:
    """Answer with a run's model over HTTP, until Ctrl-C.

    On a stack, it runs on one host and is reached through a tunnel. The server's own options come after --.
    """
    from console import serve
    from console import status as status_command
    from launch import jobs

    if {"-h", "--help"} & {*args.words}:
        return status_command.list_jobs(jobs.SERVER)
    one = "1" if args.where.stack_name == "local" else "0"
    target = dataclasses.replace(args.where, hosts=args.where.hosts or one).target()
    if len(target.hosts) > 1:
        raise RequestError(f"--hosts {args.where.hosts}: a server is one process on one host; name one")
    how = serve.Options(
        address=args.address,
        port=args.port,
        token_file=args.token_file,
        in_image=args.image,
        detach=args.detach,
        words=args.words,
    )
    return serve.serve(target, args.run, how)


@options
class Export:
    run: str = argument(DONE_RUN)
    to: str | None = option("a folder of this machine, or a URL such as gs://…")
    force: bool = flag("replace an export that is there")
    where: Where = group(Where, "stack", "slice", "runs")


@task("fab export latest --to exported/")
def export(args: Export) -> int:
    """Copy a run's model, with a model card for the Hugging Face Hub."""
    from console import export

    if not args.to:
        raise RequestError("--to: say where to, a folder or a URL such as gs://…")
    return export.export(args.where.target(), args.run, args.to, force=args.force)
