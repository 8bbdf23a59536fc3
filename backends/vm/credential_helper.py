#!/usr/bin/env python3
"""Docker's credential helper on a host: a short-lived token of the VM's service account, asked for at every pull.

`docker-credential-tpu-stack get` with the registry's host name on stdin. Nothing is kept on disk, and a token is given
only for Google's own registries. Python 3.10 or later, only its standard library.
Protocol: https://github.com/docker/docker-credential-helpers#development
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request

TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
REGISTRY = re.compile(r"(https://)?([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)(/.*)?")
LIMIT_S = 10


def get(server: str) -> dict[str, str]:
    """Return what Docker logs in with; raises ValueError where the registry is not Google's."""
    if not REGISTRY.fullmatch(server):
        raise ValueError(f"{server!r} is no Google registry, and gets no token")
    metadata = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(f"http://{metadata}{TOKEN_PATH}", headers={"Metadata-Flavor": "Google"})
    # No proxy: it would see the token.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LIMIT_S) as answer:
        token = json.load(answer)["access_token"]
    return {"ServerURL": server, "Username": "oauth2accesstoken", "Secret": token}


def main(arguments: list[str]) -> int:
    if arguments == ["list"]:
        print("{}")
        return 0
    if arguments in (["store"], ["erase"]):
        sys.stdin.read()
        return 0
    if arguments != ["get"]:
        print("usage: docker-credential-tpu-stack get|store|erase|list", file=sys.stderr)
        return 2
    try:
        print(json.dumps(get(sys.stdin.readline().strip())))
    except (OSError, ValueError, KeyError) as error:
        print(f"no token from the metadata server: {error}")  # Docker shows what is on stdout
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
