"""`python3 -S -E host VERB`: the agent out of a checkout."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from host.agent.__main__ import main

    sys.exit(main(sys.argv[1:]))
