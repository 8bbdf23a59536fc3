"""The commands: `fab --list`. Each task reads, asks launch, and reports; what it needs is imported when it runs.

It may import launch (inside the tasks, so that `fab --list` answers at once); nothing imports it.
"""

import sys

try:
    from fabfile.command_line import main
except KeyboardInterrupt:  # Ctrl-C in the half second in which everything is imported
    print("interrupted", file=sys.stderr)
    sys.exit(130)

__all__ = ["main"]

# Fabric's own `fab` (`python -m fabric`) has found this file: it hands over to ours, which knows `--` and -h.
if "fabric.main" in sys.modules:
    main()
