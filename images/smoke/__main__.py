"""`python /opt/tpu-stack/smoke`: the folder by itself, under whatever name it lies there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

folder = Path(__file__).resolve().parent
# The folder's own files may shadow nobody's modules: it is a package, found from the folder above.
sys.path[0] = str(folder.parent)
sys.exit(importlib.import_module(f"{folder.name}.program").main(sys.argv[1:]))
