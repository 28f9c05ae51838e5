"""`python -m tilemesh`: the same as the `tilemesh` command."""

import sys

from tilemesh.cli.main import main

sys.exit(main())
