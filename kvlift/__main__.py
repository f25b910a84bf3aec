"""`python -m kvlift` is the command `kvlift`."""

import sys

from kvlift.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
