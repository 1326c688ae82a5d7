"""Credentials: places where they are kept, agents, keyrings, and the very values of earlier episodes.

The values that earlier episodes of this sandbox held are looked for in every changed file, in the environment
commands start from, and in the command lines of whatever runs. Values are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, fact_fields, hookimpl

from ._common import how, undo

MAX_SCANNED = 8 << 20
"""Bytes of one file that are searched for values; a longer file is residue by itself."""

LEAST_SECRET = 6
"""Shorter values (a region, a flag) are no secrets and would be found everywhere."""

_PLACES = re.compile(
    r"/\.(ssh|gnupg|aws|azure|kube|docker|password-store|oci|databrickscfg|netrc|git-credentials|pypirc|npmrc|yarnrc|gem/credentials"
    r"|cargo/credentials(\.toml)?|pgpass|my\.cnf|s3cfg|boto|vault-token|terraformrc|terraform\.d|huggingface|rclone\.conf"
    r"|config/(gh|glab-cli|hub|gcloud|rclone|containers|doctl|op|pypoetry|huggingface)|cache/huggingface/token|local/share/keyrings)(/|$)"
    r"|^/var/run/secrets(/|$)|^/run/secrets(/|$)|^/etc/(ssh|ssl/private|krb5\.keytab|krb5cc)|^/tmp/krb5cc_"
)
_AGENT = re.compile(
    r"/(ssh-[^/]+/agent\.\d+|S\.gpg-agent[^/]*|S\.scdaemon|gpg-[^/]+/S\.[^/]+|keyring-[^/]+/[^/]+|\.X11-unix/X\d+)$"
)
_AGENT_COMMANDS = frozenset(
    {"ssh-agent", "gpg-agent", "gnome-keyring-d", "keyboxd", "scdaemon", "dirmngr", "vault"}
)
_NAMES = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH_SOCK|AGENT_INFO|AGENT_PID)",
    re.I,
)


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    held = {path for item in resetter.credentials for path in item.files}
    undo(resetter, lambda path: path in held or _word(path) is not None)


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    for change in inspector.changed("/"):
        word = _word(change.name)
        if word is not None:
            yield Residue("credential", change.name, f"{word}: {how(change)}")
    yield from _agents(inspector)
    yield from _keys(inspector)
    before = set(inspector.baseline_facts("env"))
    for line in inspector.facts("env"):
        name = fact_fields(line)[0].partition("=")[0]
        if line not in before and _NAMES.search(name):
            yield Residue("credential", name, "is in the environment that commands start from")
    yield from _values(inspector)


def _word(path: str) -> str | None:
    if _AGENT.search(path):
        return "socket of an agent"
    return "credentials are kept there" if _PLACES.search(path) else None


def _agents(inspector: Inspector) -> Iterator[Residue]:
    for process in inspector.processes():
        if process.command in _AGENT_COMMANDS:
            yield Residue("credential", process.command, f"an agent runs as pid {process.pid}")
    known = set(inspector.baseline_facts("socket"))
    for line in inspector.facts("socket"):
        local = fact_fields(line)[1]
        if line not in known and (_AGENT.search(local) or "agent" in local):
            yield Residue("credential", local, "an agent listens there")


def _keys(inspector: Inspector) -> Iterator[Residue]:
    known = set(inspector.baseline_facts("key"))
    for line in inspector.facts("key"):
        which, *rest = fact_fields(line)
        if which != "session" and line not in known:
            yield Residue("keyring", " ".join(rest), "a key that was not there before")


def _values(inspector: Inspector) -> Iterator[Residue]:
    secrets = _secrets(inspector)
    if not secrets:
        return
    for line in inspector.facts("env"):
        name, _, value = fact_fields(line)[0].partition("=")
        for owner, secret in secrets:
            if secret in value.encode("utf-8", "surrogateescape"):
                yield Residue("credential", name, f"holds a value of {owner}, in the environment")
    for process in inspector.processes():
        argv = "\0".join(process.argv).encode("utf-8", "surrogateescape")
        for owner, secret in secrets:
            if secret in argv:
                yield Residue("credential", process.command, f"holds a value of {owner}, on a command line")
    for change in inspector.changed("/"):
        path = change.name.encode("utf-8", "surrogateescape")
        raw = (inspector.read(change.name, MAX_SCANNED) or b"") if change.kind == "file" else b""
        for owner, secret in secrets:
            if secret in raw or secret in path:
                yield Residue("credential", change.name, f"holds a value of {owner}")


def _secrets(inspector: Inspector) -> list[tuple[str, bytes]]:
    """Values with a name that may be shown, as they would lie in a file."""
    found: list[tuple[str, bytes]] = []
    for item in inspector.credentials:
        found += [
            (f"{name} of {item.id}", value.encode("utf-8", "surrogateescape"))
            for name, value in item.env.items()
        ]
        found += [(f"{path} of {item.id}", bytes(raw).strip()) for path, raw in item.files.items()]
    return [(owner, value) for owner, value in found if len(value) >= LEAST_SECRET]
