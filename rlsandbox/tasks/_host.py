"""Whether the host's base has a Python for shipped tasks; if not, the one we run on is shown to them."""

from __future__ import annotations

import shutil
import sys

from ..spec import Spec

BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def host_python_spec() -> Spec | None:
    """What shipped tasks need beyond the host's base: nothing where ``python3`` is in a system directory.

    Elsewhere (a Python of its own under /opt or a home) the running one is exposed, read-only.
    """
    if sys.platform != "linux" or shutil.which("python3", path=BASE_PATH):
        return None
    return Spec(expose=("python",))
