"""From an exception to a :class:`Failure`, and from a policy's value to JSON.

Plugins name failures (``rlsandbox_classify_failure``); what no plugin names is judged by the error itself.
Whatever happens, the original type, message and traceback are kept, with secrets replaced.
"""

from __future__ import annotations

import json
import logging
import traceback
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import SandboxError
from ..results import CommandResult, Failure, FileInfo, Outcome
from . import redact

if TYPE_CHECKING:
    import pluggy

    from ..hooks import Rollout

KEPT = 64 * 1024
"""Characters kept of a message and of a traceback, head and tail."""
CAUSE = 500

log = logging.getLogger("rlsandbox.ledger")


def failure_of(
    error: BaseException,
    phase: str,
    rollout: Rollout | None = None,
    manager: pluggy.PluginManager | None = None,
    *,
    builtin: bool = False,
) -> Failure:
    """What *error* means for the rollout it happened to. Never raises.

    Args:
        builtin: ask no plugin but the built-in classifier, which also judges where another one is broken.
    """
    found: Failure | None = None
    if manager is not None and not builtin:
        try:
            found = manager.hook.rlsandbox_classify_failure(error=error, phase=phase, rollout=rollout)
        except BaseException:  # SystemExit and the like too: it is not this plugin's to end the batch
            log.warning("a plugin's rlsandbox_classify_failure raised; judged without it", exc_info=True)
        if found is not None and not isinstance(found, Failure):
            log.warning("a plugin's rlsandbox_classify_failure gave %s, not a Failure", type(found).__name__)
            found = None
    if found is None and manager is not None:
        own = getattr(manager.get_plugin("classify"), "rlsandbox_classify_failure", None)
        found = own(error, phase) if own is not None else None
    if found is None:
        found = plain_failure(error, phase)
    return replace(
        found,
        kind=str(found.kind),
        phase=str(found.phase or phase),
        cause=_one_line(redact.text(str(found.cause))),
        error=found.error or type_name(error),
        message=redact.text(found.message or _clip(message_of(error))),
        traceback=redact.text(found.traceback or _clip(printed(error))),
    )


def plain_failure(error: BaseException, phase: str) -> Failure:
    """Without plugins: one of our errors speaks for itself, anything else is its thrower's fault."""
    if isinstance(error, SandboxError):
        return Failure(error.kind, error.phase, cause_of(error), error.retryable, error.infrastructure)
    return Failure(f"{phase}_error", phase, cause_of(error), retryable=False, infrastructure=False)


def cause_of(error: BaseException) -> str:
    """One line: the type (where it is not ours) and what it says."""
    said = message_of(error)
    if isinstance(error, SandboxError) and said:
        return _one_line(said)
    return _one_line(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def printed(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as broken:
        return f"{type_name(error)}: {message_of(error)} (no traceback: {type(broken).__name__})"


def jsonable(value: Any) -> Any:
    """*value* as it will be read back from the ledger, secrets replaced.

    Raises:
        TypeError: it is neither JSON-able nor text; the message says where.
    """
    plain = redact.data(_plain(value, "value", 0))
    try:
        return json.loads(json.dumps(plain, allow_nan=False))
    except (ValueError, RecursionError) as error:  # NaN, infinity, a circle
        raise TypeError(f"the policy's value is not JSON-able: {error}") from None


def _plain(value: Any, where: str, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth > 100:
        raise TypeError(f"the policy's value is nested too deeply at {where[:80]}")
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int, float, bool)) and key is not None:
                raise TypeError(f"the policy's value is not JSON-able: {where} has a key of type {_of(key)}")
        return {
            key if isinstance(key, str) else json.dumps(key): _plain(item, f"{where}[{key!r}]", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (CommandResult, Outcome, FileInfo, Failure)):
        # Exact bytes are left to the policy: what a ledger keeps of a command is its text.
        left = ("stdout_bytes", "stderr_bytes", "merged")
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in left}
        return _plain(parts, where, depth + 1)
    raise TypeError(f"the policy's value is not JSON-able: {where} is of type {_of(value)}")


def _of(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= CAUSE else line[: CAUSE - 4] + " ..."


def _clip(text: str) -> str:
    if len(text) <= KEPT:
        return text
    half = KEPT // 2
    return f"{text[:half]}\n... {len(text) - KEPT} characters left out ...\n{text[-half:]}"
