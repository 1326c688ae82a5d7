"""What the documentation says is there: links, names, parameters, commands and their options."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import rlsandbox as rls
from rlsandbox.cli.root import group

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
KNOWN: dict[str, Any] = {  # what a variable of that name is in every snippet
    "pool": rls.Pool, "sandbox": rls.Sandbox, "sb": rls.Sandbox, "snapshot": rls.Snapshot, "sh": rls.Session,
    "shell": rls.Session, "process": rls.Process, "report": rls.Report, "fork": rls.Sandbox, "copy": rls.Sandbox,
}  # fmt: skip


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if match[1] in languages:
            yield text.count("\n", 0, match.start()) + 2, match[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = [
        target
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert dead == []


def test_every_page_and_every_example_can_be_found() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    readme = PAGES[0].read_text()
    lost = [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme]
    lost += [path.name for path in (ROOT / "examples").iterdir() if path.is_file() and path.name not in text]
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_uses_names_and_parameters_that_there_are(page: Path) -> None:
    wrong = [
        f"{page.name}:{start + line}: {what}"
        for start, code in blocks(page, "python")
        for line, what in misused(code)
    ]
    assert wrong == []


def misused(code: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            try:
                resolve(node)
            except AttributeError as error:
                yield node.lineno, str(error)
        elif isinstance(node, ast.Call):
            try:
                called = resolve(node.func)
            except AttributeError:
                continue  # told where its attribute is visited
            if called is None or not callable(called):
                continue
            known = inspect.signature(called).parameters
            if any(p.kind is p.VAR_KEYWORD for p in known.values()):
                continue
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in known:
                    yield node.lineno, f"{ast.unparse(node.func)} has no parameter {keyword.arg!r}"


def resolve(node: ast.expr) -> Any:
    """What an expression is, None when nobody can say; a part that is not there raises AttributeError."""
    if isinstance(node, ast.Name):
        return rls if node.id in ("rls", "rlsandbox") else KNOWN.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    of = resolve(node.value)
    if of is None:
        return None
    if inspect.ismodule(of):
        return getattr(of, node.attr)
    if inspect.isclass(of):
        found = inspect.getattr_static(of, node.attr, None)
        if found is None and f"self.{node.attr}" not in inspect.getsource(of):
            raise AttributeError(f"{of.__name__} has no {node.attr}")
        return found if inspect.isfunction(found) else None
    return None


def test_what_is_wrong_would_be_found() -> None:
    code = (
        "rls.Pol(size=1)\nrls.Pool(sise=1)\npool.clame(t)\nsandbox.run('x', timout=3)\nrls.Task(id='x').id\n"
    )
    assert {line for line, _ in misused(code)} == {1, 2, 3, 4}


COMMAND = re.compile(r"(?:^|[`|]|&&)\s*(rlsandbox [a-z][^`#|]*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_options_are_there(page: Path) -> None:
    text = page.read_text()
    lines = [m for _, code in blocks(page, "", "sh", "bash", "console") for m in COMMAND.findall(code)]
    lines += re.findall(r"`(rlsandbox [a-z][^`]*)`", BLOCK.sub("", text))
    wrong = [f"{line.strip()}: {what}" for line in lines for what in unknown(line)]
    assert wrong == []


def unknown(line: str) -> Iterator[str]:
    command: click.Command = group
    context = click.Context(group)
    for word in shlex.split(line.replace("...", " ").replace("[", " ").replace("]", " "))[1:]:
        if word.startswith("-"):
            name = word.partition("=")[0]
            known = {option for p in command.get_params(context) for option in (*p.opts, *p.secondary_opts)}
            if name not in known:
                yield f"{command.name} has no option {name}"
        elif isinstance(command, click.Group):
            found = command.get_command(context, word.split("|")[0])
            if found is None:
                yield f"no command {word!r}"
                return
            command = found


def test_a_wrong_command_would_be_found() -> None:
    assert list(unknown("rlsandbox runn")) == ["no command 'runn'"]
    assert list(unknown("rlsandbox run --taks demo")) == ["run has no option --taks"]
    assert list(unknown("rlsandbox ledger report --json")) == []
