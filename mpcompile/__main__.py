"""``python -m mpcompile``."""

import os
import sys

from mpcompile.cli.main import main

try:
    code = main()
    sys.stdout.flush()
except BrokenPipeError:  # whoever reads has seen enough: `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
    code = 1  # as rich ends, where it prints
sys.exit(code)
