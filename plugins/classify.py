"""The built-in failure classifier: whose fault it is, and whether a fresh sandbox may help.

It answers after every other plugin. Its rules, in order:

1. An infrastructure error anywhere in the exception's history makes the rollout innocent, even where the
   policy wrapped it in an error of its own or it came in a group: what broke is not the policy's doing.
2. One of rlsandbox's own errors speaks for itself, and for whatever it was made of inside.
3. The machine running out of something the trainer needs too (memory of the process, file descriptors,
   disk) is infrastructure when we were at work, and the policy's own doing while the policy was.
4. Anything else a policy or a grader raises is its own fault and would happen again.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

from rlsandbox.errors import LimitReachedError, SandboxError
from rlsandbox.hooks import hookimpl
from rlsandbox.results import Failure

_EXHAUSTED = frozenset({errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EDQUOT, errno.EAGAIN})
_THEIRS = ("policy", "grade", "command")


@hookimpl(trylast=True)
def rlsandbox_classify_failure(error: BaseException, phase: str) -> Failure:
    root = next((e for e in _history(error) if isinstance(e, SandboxError) and e.infrastructure), None)
    if root is not None:
        cause = str(root) if root is error else f"{root} (reported as {type(error).__name__}: {_said(error)})"
        return Failure(root.kind, root.phase, cause, root.retryable, infrastructure=True)
    if isinstance(error, SandboxError):
        kind = f"limit_{error.limit}" if isinstance(error, LimitReachedError) else error.kind
        return Failure(kind, error.phase, str(error), error.retryable, infrastructure=False)
    cause = f"{type(error).__name__}: {_said(error)}" if _said(error) else type(error).__name__
    if phase not in _THEIRS:
        exhausted = isinstance(error, MemoryError) or getattr(error, "errno", None) in _EXHAUSTED
        kind = "machine_exhausted" if exhausted else "internal"
        return Failure(kind, phase, cause, retryable=exhausted, infrastructure=True)
    kind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), f"{phase}_error")
    return Failure(kind, phase, cause, retryable=False, infrastructure=False)


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (SystemExit, "system_exit"),
    (KeyboardInterrupt, "keyboard_interrupt"),
    (asyncio.CancelledError, "cancelled_error"),
)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _history(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, SandboxError):
            continue
        if isinstance(one, BaseExceptionGroup):
            todo.extend(one.exceptions)
        # "from None" hides an exception from readers; it happened all the same.
        todo += [before for before in (one.__cause__, one.__context__) if before is not None]
