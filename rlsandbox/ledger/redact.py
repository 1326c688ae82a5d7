"""Secrets never reach a record, a cause, a traceback or a log line.

Whoever issues a credential registers its values here before anything else sees them. From then on every
text that the ledger writes, and every line that a logger below ``rlsandbox`` emits, has them replaced; also
where they appear as JSON, ``repr``, URL-quoted, base64 or (keys with several lines) line by line.
A value taken back by its issuer is remembered for a while: what quotes it may be written later.

What this cannot do: recognise a secret that was split, encrypted or counted out letter by letter.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import threading
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

SHORTEST = 4
"""Values shorter than this are not replaced: they would blank out ordinary text."""
REMEMBERED = 4096
"""Retired registrations that are still replaced; the oldest are forgotten first."""
_SCAN_ABOVE = 64
_LONG_LINE = 16

log = logging.getLogger("rlsandbox.ledger")


class Redactor:
    """A set of secrets and the functions that replace them. Thread-safe; a process has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._live: dict[int, dict[str, str]] = {}
        self._retired: OrderedDict[int, dict[str, str]] = OrderedDict()
        # One immutable view, replaced as a whole, so that readers need no lock.
        self._forms: list[tuple[str, str]] = []
        self._filtered = -1
        self._starts: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Redactor({len(self._live)} live, {len(self._retired)} retired)"

    def register(self, *values: Mapping[str, str | bytes] | Iterable[str | bytes] | str | bytes) -> int:
        """Replace these values from now on; mappings name them. Returns a token for :meth:`retire`."""
        forms: dict[str, str] = {}
        for group in values:
            for name, value in _named(group):
                text = value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")
                if len(text.strip()) < SHORTEST:
                    if text.strip():
                        log.warning("a credential of %d characters is too short to be redacted", len(text))
                    continue
                mask = f"[redacted {name}]" if name else "[redacted]"
                for form in _forms_of(text):
                    forms.setdefault(form, mask)
        with self._lock:
            token = next(self._numbers)
            self._live[token] = forms
            self._rebuild()
        filter_logs(self)
        return token

    def retire(self, token: int) -> None:
        """The values are worthless now. They are still replaced until many others have been retired."""
        with self._lock:
            forms = self._live.pop(token, None)
            if forms is None:
                return
            self._retired[token] = forms
            if len(self._retired) > REMEMBERED:
                while len(self._retired) > REMEMBERED:
                    self._retired.popitem(last=False)
                self._rebuild()

    def text(self, text: str) -> str:
        """*text* with every secret replaced."""
        forms = self._forms
        if not forms or len(text) < SHORTEST:
            return text
        if len(forms) > _SCAN_ABOVE:
            # Cost bounded by the text's length, however many secrets there are.
            starts = self._starts
            found = {text[i : i + SHORTEST] for i in range(len(text) - SHORTEST + 1)} & starts
            if not found:
                return text
            forms = [form for form in forms if form[0][:SHORTEST] in found]
        for secret, mask in forms:
            if secret in text:
                text = text.replace(secret, mask)
        return text

    def data(self, value: Any) -> Any:
        """JSON-like data with every secret replaced: in strings, keys, and numbers that spell one."""
        if not self._forms:
            return value
        return self._walk(value)

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self._walk(key): self._walk(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._walk(item) for item in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            spelled = str(value)
            replaced = self.text(spelled)
            return value if replaced == spelled else replaced
        return value

    def _rebuild(self) -> None:
        forms: dict[str, str] = {}
        for group in (*self._retired.values(), *self._live.values()):
            forms.update(group)
        # Longest first: a secret that contains another one is replaced as a whole.
        self._forms = sorted(forms.items(), key=lambda form: -len(form[0]))
        self._starts = frozenset(form[:SHORTEST] for form in forms)


class RedactingFilter(logging.Filter):
    """Replaces secrets in the message, the traceback and the extra fields of a log record."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def filter(self, record: logging.LogRecord) -> bool:
        redactor = self._redactor
        try:
            message = record.getMessage()
        except Exception:  # the handler reports bad arguments itself, with the place they came from
            return True
        clean = redactor.text(message)
        if clean != message:
            record.msg, record.args = clean, ()
        if record.exc_info and record.exc_info[1] is not None:
            printed = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            clean = redactor.text(printed)
            if clean != printed:
                # Handlers that format the exception themselves must not see it again.
                record.exc_info, record.exc_text = None, clean
        for name, value in record.__dict__.items():
            if name not in _STANDARD and isinstance(value, (str, dict, list, tuple)):
                record.__dict__[name] = redactor.data(value)
        return True


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_OURS = ("rlsandbox", "rlsandbox_plugins", "rlsandbox_trl", "rlsandbox_verl")


def filter_logs(redactor: Redactor) -> None:
    """Put the filter on every logger of ours: a filter on a parent sees nothing of its children."""
    known = logging.root.manager.loggerDict
    if len(known) == redactor._filtered:
        return
    redactor._filtered = len(known)
    for name, logger in [("rlsandbox", logging.getLogger("rlsandbox")), *list(known.items())]:
        if name.split(".")[0] in _OURS and isinstance(logger, logging.Logger):
            held = [f for f in logger.filters if isinstance(f, RedactingFilter)]
            if not any(f._redactor is redactor for f in held):
                logger.addFilter(RedactingFilter(redactor))


def _named(
    group: Mapping[str, str | bytes] | Iterable[str | bytes] | str | bytes,
) -> Iterable[tuple[str, str | bytes]]:
    if isinstance(group, Mapping):
        return list(group.items())
    if isinstance(group, (str, bytes)):
        return [("", group)]
    return [("", value) for value in group]


def _forms_of(text: str) -> set[str]:
    whole = {text, text.strip()}
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) > 1:
        whole |= {line for line in lines if len(line) >= _LONG_LINE}
    forms = set(whole)
    for plain in whole:
        raw = _bytes(plain)
        forms |= {json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1], repr(plain)[1:-1]}
        forms |= {repr(raw)[2:-1], quote(raw), quote(raw, safe=""), quote_plus(raw)}
        forms |= {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}
    forms |= {form.rstrip("=") for form in forms if form.endswith("=")}
    return {form for form in forms if len(form) >= SHORTEST}


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


_process = Redactor()
register = _process.register
retire = _process.retire
text = _process.text
data = _process.data
