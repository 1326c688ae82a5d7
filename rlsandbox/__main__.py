"""``python -m rlsandbox`` is ``rlsandbox``."""

import sys

from .cli import main

sys.exit(main())
