"""Which versions of verl this was tested with. Another one gets one error that names the range."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rlsandbox.errors import UnsupportedError

FIRST, END = (0, 9, 1), (0, 10)
WANTED = "verl>=0.9.1,<0.10"


def require() -> None:
    """Raise UnsupportedError unless the verl that is installed was tested."""
    hint = f'pip install "{WANTED}"'
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise UnsupportedError(
            f"rlsandbox_verl needs {WANTED}, which is not installed", phase="config", hint=hint
        ) from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < END:
        raise UnsupportedError(
            f"rlsandbox_verl supports {WANTED}, not verl {found}", phase="config", hint=hint
        )
