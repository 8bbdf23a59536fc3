"""`python3 -S -E agent/__main__.py VERB`: how a supervisor is started, from wherever this package lies."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    __package__ = "agent"
    from .main import main

    sys.exit(main(sys.argv[1:]))
