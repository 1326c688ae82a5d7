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
        self._index: dict[str, dict[str, list[str]]] = {}
        """Forms by their first characters, each with the masks of those who registered it."""
        self._filtered = -1

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
            for form, mask in forms.items():
                self._index.setdefault(form[:SHORTEST], {}).setdefault(form, []).append(mask)
        filter_logs(self)
        return token

    def retire(self, token: int) -> None:
        """The values are worthless now. They are still replaced until many others have been retired."""
        with self._lock:
            forms = self._live.pop(token, None)
            if forms is None:
                return
            self._retired[token] = forms
            while len(self._retired) > REMEMBERED:
                self._forget(self._retired.popitem(last=False)[1])

    def text(self, text: str) -> str:
        """*text* with every secret replaced."""
        if not self._index or len(text) < SHORTEST:
            return text
        with self._lock:
            index = self._index
            if len(index) <= _SCAN_ABOVE:
                starts = [start for start in index if start in text]
            else:
                # Cost bounded by the text's length, however many secrets there are.
                grams = {text[i : i + SHORTEST] for i in range(len(text) - SHORTEST + 1)}
                starts = [gram for gram in grams if gram in index]
            found = [(f, masks[-1]) for start in starts for f, masks in index[start].items() if f in text]
        return _replaced(text, found) if found else text

    def data(self, value: Any) -> Any:
        """JSON-like data with every secret replaced: in strings, keys, and numbers that spell one."""
        return self._walk(value) if self._index else value

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

    def _forget(self, forms: dict[str, str]) -> None:
        for form, mask in forms.items():
            known = self._index[form[:SHORTEST]]
            known[form].remove(mask)
            if not known[form]:
                del known[form]
            if not known:
                del self._index[form[:SHORTEST]]


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


def _replaced(text: str, found: list[tuple[str, str]]) -> str:
    """Every stretch that one or several forms cover becomes one mask, that of the longest."""
    spans = []
    for form, mask in found:
        at = text.find(form)
        while at >= 0:
            spans.append((at, at + len(form), mask))
            at = text.find(form, at + 1)
    spans.sort(key=lambda span: (span[0], -span[1]))
    out, upto = [], 0
    while spans:
        begin, end, mask = spans.pop(0)
        longest = end - begin
        while spans and spans[0][0] < end:
            other, other_end, other_mask = spans.pop(0)
            if other_end - other > longest:
                longest, mask = other_end - other, other_mask
            end = max(end, other_end)
        out += [text[upto:begin], mask]
        upto = end
    return "".join([*out, text[upto:]])


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
        forms.add(json.dumps(json.dumps(plain)[1:-1])[1:-1])
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
