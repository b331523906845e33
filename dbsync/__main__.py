"""`python -m dbsync` is the command `dbsync`."""

import sys

from dbsync.cli import main

sys.exit(main())
