"""``python -m mpcompile``."""

import sys

from mpcompile.cli.main import main

sys.exit(main())
