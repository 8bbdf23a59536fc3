"""The guardian's process: removes a rehearsal when the process that made it is gone (guardian.py).

python -m rehearsal.machines NAME      waits on its standard input
"""

import sys

from rehearsal.machines.guardian import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
