"""Which versions of the trainer this was tested with. Another one gets one error that names the range."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlsandbox.errors import UnsupportedError

SUPPORTED = {"trl": ((1, 12), (1, 17)), "transformers": ((5, 20), (5, 25))}
"""Package to the oldest version that was tried and the first that was not."""
OWN_ROLLOUTS = ("_generate_and_score_completions", "_generate_single_turn", "_calculate_rewards")


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


def require_own_rollouts(trainer: Any) -> None:
    """Raise UnsupportedError unless *trainer* makes its rollouts itself, as a GRPOTrainer does."""
    missing = [name for name in OWN_ROLLOUTS if not callable(getattr(trainer, name, None))]
    if missing:
        raise UnsupportedError(
            f"{type(trainer).__name__} does not make its rollouts itself, as GRPOTrainer does",
            hint=f"it has no {missing[0]}; AsyncGRPO takes the factory and sandbox_reward() without attach",
        )


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
