"""Writes an image of one static program that waits (catatonit -P), as an archive that containerd imports.

python3 pause.py PROGRAM ARCHIVE
"""

import hashlib
import io
import json
import os
import sys
import tarfile

NAME = "tpu-stack/pause:1"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def archive(files: "dict[str, bytes]") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            packed.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def main(program: str, target: str) -> None:
    with open(program, "rb") as file:
        layer = archive({"pause": file.read()})
    config = {
        "architecture": ARCHITECTURES[os.uname().machine],
        "os": "linux",
        "config": {"Entrypoint": ["/pause", "-P"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    files = {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
    }
    with open(target, "wb") as file:
        file.write(archive(files))


if __name__ == "__main__":
    main(*sys.argv[1:])
