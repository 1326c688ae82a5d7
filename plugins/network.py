"""The network: sockets, interfaces, addresses, routes, and the files that say where connections go."""

from __future__ import annotations

from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, fact_fields, hookimpl

from ._common import named, undo, within, words

FILES = words(
    """
    /etc/hosts /etc/resolv.conf /etc/hostname /etc/nsswitch.conf /etc/hosts.allow /etc/hosts.deny
    /etc/gai.conf /etc/host.conf /etc/services /etc/networks /etc/ssl/certs /usr/local/share/ca-certificates
    /etc/apt/apt.conf.d /etc/wgetrc /etc/curlrc
    """
)
HOME_FILES = (".curlrc", ".wgetrc")


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    undo(resetter, lambda path: _word(path) is not None)


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    known = set(inspector.baseline_facts("socket"))
    for line in inspector.facts("socket"):
        if line not in known:
            proto, local, remote, state, *_ = fact_fields(line)
            yield Residue(
                "socket",
                f"{proto} {local}",
                f"{state or 'open'}, peer {remote}" if remote else state or "open",
            )
    now, then = inspector.facts("net"), inspector.baseline_facts("net")
    for line in set(now) - set(then):
        yield Residue("network", " ".join(fact_fields(line)), "new")
    for line in set(then) - set(now):
        yield Residue("network", " ".join(fact_fields(line)), "missing")
    yield from named(inspector, "network", _word)


def _word(path: str) -> str | None:
    if within(path, *FILES) or path.rsplit("/", 1)[-1] in HOME_FILES:
        return "says where connections go"
    return None
