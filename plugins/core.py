"""Everything that makes an episode what it is, compared with the baseline.

This check knows no file names and no tools: any changed path anywhere is residue, and so is any difference
in mounts, IPC objects, namespaces, environment, directories, descriptors, keyrings, limits, capabilities,
names and layers. The other plugins say more about what they recognise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rlsandbox.hooks import Inspector, Residue, fact_fields, hookimpl

from ._common import how

MAX_FILES = 500


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    yield from _files(inspector)
    for kind, (residue, word) in _COMPARED.items():
        yield from _compared(inspector, kind, residue, word)
    yield from _upper(inspector)
    yield from _layer(inspector)
    yield from _fresh(inspector)


def _files(inspector: Inspector) -> Iterator[Residue]:
    changes = list(inspector.changed("/"))
    for change in changes[:MAX_FILES]:
        yield Residue("file", change.name, how(change))
    more = len(changes) - MAX_FILES + getattr(inspector, "more_changes", 0)
    if more > 0:
        yield Residue("file", "/", f"{more} more paths were changed")


def _upper(inspector: Inspector) -> Iterator[Residue]:
    """Trees that are not empty, and top directories whose own mode, owner or attributes differ."""
    told = {change.name for change in inspector.changed("/")}
    for line in inspector.facts("upper"):
        target, entries, *_ = fact_fields(line)
        if entries != "0" and not any(name.startswith(target.rstrip("/") + "/") for name in told):
            yield Residue("file", target, f"{entries} entries lie in this tree that no list of changes tells")
    # A setup or a snapshot may have changed them: then they are as in its layer.
    layers = {top[0]: top[1:] for top in (line.split("\t") for line in inspector.facts("top"))}
    then = []
    for line in inspector.baseline_facts("upper"):
        target, entries, *how_it_was = line.split("\t")
        own = layers.get(target, ())
        then.append("\t".join((target, entries, *own, *how_it_was[len(own) :])))
    yield from _compared(
        inspector,
        "upper",
        "file",
        lambda f: (f[0], " ".join(f[2:])),
        key=lambda line: _without(line, 1),
        then_lines=tuple(then),
    )


def _without(line: str, column: int) -> str:
    row = line.split("\t")
    return "\t".join(row[:column] + row[column + 1 :])


def _layer(inspector: Inspector) -> Iterator[Residue]:
    """The layer on top; what lies below it belongs to it."""
    now, then = inspector.facts("layer")[:1], inspector.baseline_facts("layer")[:1]
    if now != then:
        yield Residue("layer", now[0] if now else "base", f"should be {then[0] if then else 'the bare base'}")


def _fresh(inspector: Inspector) -> Iterator[Residue]:
    """Namespaces and session keyrings that an earlier episode had already."""
    episode = _episode(inspector)
    for line in inspector.facts("ns"):
        name, _inode, first, *shared = fact_fields(line)
        if not shared and int(first) < episode:
            yield Residue("namespace", name, f"is still that of episode {first}, now is {episode}")
    for line in inspector.facts("key"):
        which, *rest = fact_fields(line)
        if which == "session" and int(rest[1]) < episode:
            yield Residue("keyring", "session", f"is still that of episode {rest[1]}, now is {episode}")


def _episode(inspector: Inspector) -> int:
    lines = inspector.facts("episode")
    if len(lines) != 1:
        raise ValueError(f"the keeper told {len(lines)} episode numbers, not one")
    return int(lines[0])


Word = Callable[[list[str]], tuple[str, str]]
"""From the fields of a fact: what it is, and how it is."""


def _compared(
    inspector: Inspector,
    kind: str,
    residue: str,
    word: Word,
    key: Callable[[str], str] = lambda line: line,
    then_lines: Sequence[str] | None = None,
) -> Iterator[Residue]:
    """Facts of *kind* as a multiset against the baseline's; *key* leaves out what may differ."""
    now_lines = inspector.facts(kind)
    if then_lines is None:
        then_lines = inspector.baseline_facts(kind)
    if now_lines == then_lines:
        return
    now, then = Counter(map(key, now_lines)), Counter(map(key, then_lines))
    news = {key(line): line for line in now_lines}
    olds = {key(line): line for line in then_lines}
    added, missing = now - then, then - now
    changed = dict(word(fact_fields(olds[k])) for k in missing)
    for k in added:
        what, detail = word(fact_fields(news[k]))
        if what in changed:
            was = changed.pop(what)
            yield Residue(residue, what, f"is {detail}, was {was}" if detail or was else "differs")
        else:
            yield Residue(residue, what, f"new: {detail}" if detail else "new")
    for what, detail in changed.items():
        yield Residue(residue, what, f"missing, was: {detail}" if detail else "missing")


def _rest(fields: list[str]) -> tuple[str, str]:
    return fields[0], " ".join(fields[1:])


def _variable(fields: list[str]) -> tuple[str, str]:
    return fields[0].partition("=")[0], ""  # never the value: it may be a secret


def _object(fields: list[str]) -> tuple[str, str]:
    kind, key, number, *rest = fields
    names = ("uid", "mode", "size")
    return f"{kind} {number}", ", ".join(
        [f"key {key}", *(f"{n} {v}" for n, v in zip(names, rest, strict=False))]
    )


def _lower(fields: list[str]) -> tuple[str, str]:
    return fields[0], "as modified at " + fields[-1]


_COMPARED: dict[str, tuple[str, Word]] = {
    "lower": ("base", _lower),
    "mount": ("mount", _rest),
    "ipc": ("ipc", _object),
    "env": ("environment", _variable),
    "cwd": ("directory", lambda f: ("working directory", " ".join(f))),
    "root": ("directory", lambda f: ("root directory", " ".join(f))),
    "fd": ("descriptor", lambda f: (f"{f[0]}", " ".join(f[1:]))),
    "limit": ("limit", _rest),
    "status": ("process state", _rest),
    "uts": ("hostname", lambda f: ("hostname", " ".join(f))),
    "cgroup": ("cgroup", _rest),
}
