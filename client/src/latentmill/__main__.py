"""`python -m latentmill` is the command `latentmill`."""

import sys

from latentmill.cli import main

sys.exit(main())
