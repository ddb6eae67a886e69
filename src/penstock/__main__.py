"""``python -m penstock``: the same as the ``penstock`` command, where that is not on the PATH."""

import sys

from penstock.cli import main

sys.exit(main())
