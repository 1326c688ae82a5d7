"""Secrets: in every form in which a text may carry them, and in none of what comes out."""

from __future__ import annotations

import base64
import json
import logging
import random
import string
import threading
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsandbox.ledger.redact import REMEMBERED, RedactingFilter, Redactor

SECRET = "hunter2-S3cr3t/+=&\"quote'\n tail"
FORMS = {
    "plain": str,
    "json": json.dumps,
    "json in json": lambda s: json.dumps({"a": json.dumps(s)}),
    "repr": repr,
    "repr of bytes": lambda s: repr(s.encode()),
    "quoted": quote,
    "quoted all": lambda s: quote(s, safe=""),
    "quoted plus": quote_plus,
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "base64 url": lambda s: base64.urlsafe_b64encode(s.encode()).decode().rstrip("="),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    redactor = Redactor()
    text = f"before {FORMS[form](SECRET)} after"
    assert "hunter2" in text or form.startswith("base64")
    assert redactor.text(text) == text, "not registered yet"
    redactor.register({"TOKEN": SECRET})
    clean = redactor.text(text)
    assert "[redacted TOKEN]" in clean
    assert "hunter2" not in clean
    assert clean.startswith("before ")
    assert clean.endswith(" after")


def test_bytes_and_files_with_a_final_newline() -> None:
    redactor = Redactor()
    redactor.register({"key": b"abcdef-token\n", "bin": b"\xff\xfe\x00binary-secret"})
    assert redactor.text("x abcdef-token y") == "x [redacted key] y"
    assert "binary-secret" not in redactor.text(repr(b"\xff\xfe\x00binary-secret"))


def test_a_key_of_several_lines_is_found_line_by_line() -> None:
    lines = [
        "-----BEGIN KEY-----",
        "MIIEowIBAAKCAQEAxyzzy0123456789",
        "AbCdEfGhIjKlMnOpQrStUvWxYz0987",
        "-----END KEY-----",
    ]
    redactor = Redactor()
    redactor.register({"KEY": "\n".join(lines)})
    assert "xyzzy" not in redactor.text(f"line: {lines[1]}")
    assert redactor.text("ok") == "ok"


def test_data_keys_values_and_numbers() -> None:
    redactor = Redactor()
    redactor.register(["swordfish", "12345678"])
    data = {"a swordfish": ["swordfish", 12345678, 1.5, True, None, {"x": "swordfish"}], "n": 12}
    assert redactor.data(data) == {
        "a [redacted]": ["[redacted]", "[redacted]", 1.5, True, None, {"x": "[redacted]"}],
        "n": 12,
    }


def test_a_longer_secret_wins_over_one_that_it_contains() -> None:
    redactor = Redactor()
    redactor.register({"SHORT": "abcd"})
    redactor.register({"LONG": "abcd-efgh"})
    assert redactor.text("abcd-efgh abcd") == "[redacted LONG] [redacted SHORT]"


def test_short_values_are_not_replaced_and_it_is_said_without_them(caplog: pytest.LogCaptureFixture) -> None:
    redactor = Redactor()
    with caplog.at_level("WARNING"):
        redactor.register({"PIN": "az9", "EMPTY": "", "BLANK": "   "})
    assert redactor.text("az9 banana") == "az9 banana"
    assert caplog.text.count("too short") == 1
    assert "az9" not in caplog.text


def test_retired_values_are_remembered_for_long_and_not_for_ever() -> None:
    redactor = Redactor()
    token = redactor.register({"A": "first-secret"})
    redactor.retire(token)
    redactor.retire(token)
    assert redactor.text("first-secret") == "[redacted A]"
    live = redactor.register({"L": "living-secret"})
    for i in range(REMEMBERED):
        redactor.retire(redactor.register({"B": f"secret number {i}"}))
    assert redactor.text("first-secret") == "first-secret"
    assert redactor.text("living-secret") == "[redacted L]"
    assert redactor.text(f"secret number {REMEMBERED - 1}") == "[redacted B]"
    redactor.retire(live)


TEXT = st.text(alphabet="AB01 \n\"'\\é\ud800\U0001f600")


@given(
    st.lists(TEXT.filter(lambda s: len(s.strip()) >= 4), min_size=1, max_size=5), TEXT, st.integers(0, 2**32)
)
def test_nothing_that_was_registered_is_left_standing(secrets: list[str], text: str, seed: int) -> None:
    rng = random.Random(seed)
    for secret in secrets:
        at = rng.randint(0, len(text))
        text = text[:at] + secret + text[at:]
    redactor = Redactor()
    redactor.register(secrets)
    clean = redactor.text(text)
    for secret in secrets:
        assert secret not in clean
        assert secret.strip() not in clean


def test_secrets_that_overlap_leave_no_rest() -> None:
    redactor = Redactor()
    redactor.register({"A": "secret-one", "B": "one-and-two"})
    assert redactor.text("<secret-one-and-two>") == "<[redacted B]>"
    assert redactor.text("<secret-one><one-and-two>") == "<[redacted A]><[redacted B]>"


def test_many_secrets_are_found_like_few() -> None:
    rng = random.Random(1)
    secrets = ["".join(rng.choices(string.ascii_letters, k=20)) for _ in range(3000)]
    redactor = Redactor()
    for secret in secrets:
        redactor.register([secret])
    text = " ".join(["word"] * 500 + secrets[::100] + ["end"])
    clean = redactor.text(text)
    assert clean.count("[redacted]") == len(secrets[::100])
    assert not any(secret in clean for secret in secrets)
    assert redactor.text("nothing in here " * 100) == "nothing in here " * 100


def test_threads_may_register_while_others_read() -> None:
    redactor = Redactor()
    redactor.register(["always-there"])
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not stop.is_set():
            clean = redactor.text("x always-there y")
            if clean != "x [redacted] y":
                wrong.append(clean)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(300):
        redactor.retire(redactor.register([f"secret-{i:06}"]))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_log_lines_of_every_logger_of_ours() -> None:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(self.format(record) + str(getattr(record, "extra_field", "")) + str(record.exc_info))

    early = logging.getLogger("rlsandbox.test_redact.early")
    redactor = Redactor()
    redactor.register({"T": "tok-en-val"})
    late = logging.getLogger("rlsandbox.test_redact.late")
    redactor.register({"T2": "another-value"})
    other = logging.getLogger("somebody.else")
    handler = Keep()
    logging.getLogger("rlsandbox").addHandler(handler)
    other.addHandler(handler)
    try:
        for logger in (early, late):
            logger.warning("with %s and %d", "tok-en-val", 3, extra={"extra_field": ["tok-en-val"]})
            try:
                raise ValueError("bad tok-en-val")
            except ValueError:
                logger.exception("it broke: %s", {"key": "tok-en-val"})
        assert "tok-en-val" not in "".join(seen)
        assert "with [redacted T] and 3" in seen[0]
        assert "ValueError: bad [redacted T]" in seen[1]
        other.warning("tok-en-val")
        assert "tok-en-val" in seen[-1], "other people's loggers are theirs"
    finally:
        logging.getLogger("rlsandbox").removeHandler(handler)
        other.removeHandler(handler)
        for logger in (early, late, logging.getLogger("rlsandbox")):
            for f in [
                f for f in logger.filters if isinstance(f, RedactingFilter) and f._redactor is redactor
            ]:
                logger.removeFilter(f)
