"""A package index of a test's own: folders of wheels, which uv reads by a file:// URL."""

import zipfile
from pathlib import Path


def add_wheel(
    index: Path, name: str, version: str, requires: str = "", tag: str = "py3-none-any", program: str = ""
) -> None:
    """Put a package of one module into an index, which is a folder."""
    folder, info = index / name, f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as packed:
        packed.writestr(f"{name}.py", f"version = {version!r}\ndef main(): print('hello from', __file__)\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        packed.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        packed.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        if program:
            packed.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{program} = {name}:main\n")
        packed.writestr(f"{info}/RECORD", "")
    list_files(folder)


def list_files(folder: Path) -> None:
    links = [
        f'<a href="{path.name}">{path.name}</a>' for path in folder.iterdir() if path.name != "index.html"
    ]
    (folder / "index.html").write_text(f"<html><body>{''.join(links)}</body></html>")
