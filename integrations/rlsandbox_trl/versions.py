"""Which versions of the trainer this was tested with. Another one gets one error that names the range."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rlsandbox.errors import UnsupportedError

SUPPORTED = {"trl": ((1, 16), (1, 17)), "transformers": ((5, 24), (5, 25))}
"""Package to the first version that works and the first that was not tried."""


def require() -> None:
    """Raise UnsupportedError unless what is installed is in the supported range."""
    for name, (first, end) in SUPPORTED.items():
        wanted = f"{name}>={_text(first)},<{_text(end)}"
        hint = 'pip install "rlsandbox-pool[trl]"'
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UnsupportedError(
                f"rlsandbox_trl needs {wanted}, which is not installed", hint=hint
            ) from None
        numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
        if not first <= numbers < end:
            raise UnsupportedError(f"rlsandbox_trl supports {wanted}, not {name} {found}", hint=hint)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
