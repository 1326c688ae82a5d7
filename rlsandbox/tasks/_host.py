"""Whether the host's base has a Python for shipped tasks; if not, the one we run on is shown to them."""

from __future__ import annotations

import os
import shutil
import sys

from ..spec import Spec

BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def host_python_spec() -> Spec | None:
    """What shipped tasks need beyond the host's base: nothing where ``python3`` is in a system directory.

    Elsewhere (a Python of its own under /opt or a home) that installation is exposed read-only and put on
    the PATH. On a machine without either, the tasks stay as they are and the image must bring a Python.
    """
    if sys.platform != "linux" or shutil.which("python3", path=BASE_PATH):
        return None
    home = os.path.realpath(sys.base_prefix)
    if not os.access(os.path.join(home, "bin", "python3"), os.X_OK):
        return None
    return Spec(expose=(home,), env={"PATH": f"{BASE_PATH}:{home}/bin"})
