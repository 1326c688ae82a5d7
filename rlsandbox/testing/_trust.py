"""Conformance: graders run on what the rollout could not choose, and see all of its work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..sandbox import Sandbox
from ..task import Grader, Task
from ._fixtures import Fixtures

SHIM = "printf '#!/bin/sh\\nexit 0\\n' >{0}; chmod 755 {0}"
# busybox's shell runs its own grep, whatever PATH says: another shell, where there is one.
GREP = "if command -v bash >/dev/null; then bash -c 'grep -q 42 answer'; else grep -q 42 answer; fi"
CHECK = "python3 -c \"import json; assert open('answer').read() == '42'\""
TESTED = {
    "tests/check.py": "import util\nassert util.read() == '42'\n",
    "tests/util.py": "read = open('answer').read",
}
EXIT = "import os; os._exit(0)"
UNCHECKED = (
    "python3 -c \"import importlib.util as u, py_compile as p; p.compile('/tmp/evil.py', "
    "cfile=u.cache_from_source('tests/util.py'), invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)\""
)

# What an agent does that has not solved the task, and the grader that it fools.
ATTACKS: dict[str, tuple[str, str]] = {
    "program in front": ("mkdir -p /usr/local/bin; " + SHIM.format("/usr/local/bin/grep"), GREP),
    "program further in front": ("mkdir -p /usr/local/sbin; " + SHIM.format("/usr/local/sbin/grep"), GREP),
    "program replaced": (
        "for t in /usr/bin/grep /bin/grep; do rm -f $t; " + SHIM.format("$t") + "; done; true",
        GREP,
    ),
    "directory of programs moved": (
        "mkdir -p /tmp/local/bin; " + SHIM.format("/tmp/local/bin/grep") + "; rm -rf /usr/local; "
        "ln -s /tmp/local /usr/local",
        GREP,
    ),
    "hard link": ('ln "$(command -v grep)" /usr/share/g && cat /bin/true >/usr/share/g', GREP),
    "shell replaced": ("ln -sf /bin/true /bin/sh", GREP),
    "interpreter in front": (
        "mkdir -p /usr/local/bin; " + SHIM.format("/usr/local/bin/python3"),
        CHECK,
    ),
    "sitecustomize": (
        "d=$(python3 -c 'import json; print(json.__path__[0])'); "
        f"rm -f $d/../sitecustomize.py; echo '{EXIT}' >$d/../sitecustomize.py; mkdir -p /etc/python3; "
        f"echo '{EXIT}' >/etc/python3/sitecustomize.py; true",
        CHECK,
    ),
    "usercustomize": (
        'd=$(python3 -m site --user-site); mkdir -p "$d"; ' f"echo '{EXIT}' >\"$d/usercustomize.py\"",
        CHECK,
    ),
    "pth": (
        'd=$(python3 -m site --user-site); mkdir -p "$d"; ' f"echo '{EXIT}' >\"$d/evil.pth\"",
        CHECK,
    ),
    "module of the library": (
        f"echo '{EXIT}' >\"$(python3 -c 'import json; print(json.__file__)')\"",
        CHECK,
    ),
    "byte code of a hidden file": (
        "mkdir -p tests; echo \"def read(): return '42'\" >/tmp/evil.py; " + UNCHECKED,
        "python3 tests/check.py",
    ),
    "git's configuration": (
        "printf '#!/bin/sh\\nprintf 42 >answer\\n' >/tmp/m; chmod 755 /tmp/m; "
        "git config core.fsmonitor /tmp/m",
        "git status >/dev/null; " + GREP,
    ),
    "git's hook": (
        "mkdir -p .git/hooks; printf '#!/bin/sh\\nprintf 42 >answer\\n' >.git/hooks/post-checkout; "
        "chmod 755 .git/hooks/*",
        "git checkout -q -b graded; " + GREP,
    ),
    "git's configuration at home": (
        "printf '#!/bin/sh\\nprintf 42 >answer\\n' >/tmp/m; chmod 755 /tmp/m; "
        "git config --global core.fsmonitor /tmp/m",
        "git status >/dev/null; " + GREP,
    ),
}  # fmt: skip
SETUP = (
    "if command -v git; then git init -q . && "
    "git -c user.name=a -c user.email=a commit -q --allow-empty -m a; fi"
)
PLACES = [
    "/etc/ld.so.preload",
    "/etc/profile.d/x.sh",
    "/etc/evil",
    "/usr/share/evil",
    "/opt/evil",
    "/root/.bashrc.d/x",
    "/root/bin/x",
    "/root/.local/bin/x",
    "/home/u/.profile",
    "tests/__pycache__/x.pyc",
    "conftest.py",
    "sub/conftest.py",
    "pytest.ini",
    "sitecustomize.py",
]

MADE = [
    "answer",
    ".hidden",
    ".env",
    "Makefile",
    "setup.cfg",
    "pyproject.toml",
    "node_modules/.bin/x",
    "bin/tool",
    "lib/x.py",
    "/tmp/out",
    "/root/notes.txt",
    "/root/.cache/x",
    "/home/u/data",
    "/srv/x",
    "/data/x",
    "/var/lib/x",
    "new/.git/HEAD",
    "new/.git/config",
    "new/.git/hooks/pre-commit",
]


def _task(command: str, *, files: dict[str, str] | None = None, **how: object) -> Task:
    grader = Grader(command=command, files=files or {}, **how)  # type: ignore[arg-type]
    return Task(id="t", workdir="/tmp/work", files={"answer": "0"}, setup=SETUP, grader=grader)


def _needs_own_base(make: Callable[..., Sandbox]) -> None:
    """Skips where the base's files belong to nobody inside: there no rollout can change them either."""
    probe = "mkdir -p /usr/src /usr/local/lib && touch /usr/src/probe /usr/local/lib/probe /etc/probe"
    if not make(_task("true")).run(probe).ok:
        pytest.skip("the base belongs to somebody that this sandbox has no uid for")


class Trusting(Fixtures):
    @pytest.mark.parametrize("name", ATTACKS)
    def test_trust_of_graders(self, make: Callable[..., Sandbox], name: str) -> None:
        attack, command = ATTACKS[name]
        files = TESTED if "tests/" in command else {}
        control = make(_task(command, files=files, work=["/"]))
        control.run(attack)
        if control.grade().reward != 1.0:
            pytest.skip("no attack on this image: it fools nobody even where everything is trusted")
        # Where nobody knows how files were, none can be put back: there only fresh graders are trusted.
        for fresh in (True,) if control.reset_mode == "replace" else (False, True):
            fooled = make(_task(command, files=files, fresh=fresh))
            fooled.run(attack)
            outcome = fooled.grade()
            assert outcome.reward == 0.0, outcome.result
            solved = make(_task(command, files=files, fresh=fresh))
            solved.run(f"printf 42 >answer; {attack}")
            outcome = solved.grade()
            assert outcome.reward == 1.0, outcome.result

    def test_trust_puts_back_what_is_loaded_unasked(self, make: Callable[..., Sandbox]) -> None:
        _needs_own_base(make)
        there = "; ".join(f"[ -e {place} ] && echo {place}" for place in PLACES) + "; ls /etc/passwd; true"
        plant = "".join(f"mkdir -p $(dirname {p}); echo x >>{p}; " for p in PLACES) + "rm /etc/passwd"
        kept, back = make(_task(there, work=["/"])), make(_task(there))
        kept.run(plant)
        back.run(plant)
        outcome = kept.grade()
        assert outcome.result is not None
        assert (outcome.result.stdout.split(), outcome.put_back) == (PLACES, ())
        outcome = back.grade()
        assert outcome.result is not None
        assert outcome.result.stdout == "/etc/passwd\n"
        said = set(outcome.put_back)
        assert {"/etc/ld.so.preload", "/etc/passwd", "/tmp/work/conftest.py", "/tmp/work/pytest.ini"} <= said
        assert not any("__pycache__" in name for name in said)

    def test_trust_leaves_the_work_alone(self, make: Callable[..., Sandbox]) -> None:
        """Whatever an honest rollout made, where graders load nothing from by themselves."""
        task = _task(
            "for p in " + " ".join(MADE) + '; do [ "$(cat $p)" = mine ] && echo $p; done; ls -d gone'
        )
        sandbox = make(task)
        made = sandbox.run(
            "".join(f"mkdir -p $(dirname {p}) && echo mine >{p} && echo {p}; " for p in MADE)
            + "ln -s / link; chmod 700 bin"
        ).stdout
        # Where commands are an ordinary user's, not all of them can be made.
        assert {p for p in MADE if p[0] != "/" or p.startswith("/tmp/")} <= set(made.split())
        outcome = sandbox.grade()
        assert outcome.result is not None
        assert (outcome.result.stdout, outcome.put_back) == (made, ())

    @pytest.mark.parametrize("workdir", ["/usr/src/app", "/root", "/etc/app"])
    def test_trust_where_the_workdir_is_among_programs(
        self, make: Callable[..., Sandbox], workdir: str
    ) -> None:
        _needs_own_base(make)
        grader = Grader(
            command=f"cat {workdir}/a {workdir}/.hidden; ls /usr/local/bin/x /etc/x {workdir}/.bash_login"
        )
        sandbox = make(Task(id="w", workdir=workdir, files={"a": "old\n"}, grader=grader))
        sandbox.run(
            f"cd {workdir}; echo 1 >a; echo 2 >.hidden; echo x >.bash_login; mkdir -p /usr/local/bin; "
            "echo >/usr/local/bin/x; echo >/etc/x",
            check=True,
        )
        outcome = sandbox.grade()
        assert outcome.result is not None
        mine = "" if workdir == "/root" else f"{workdir}/.bash_login\n"
        assert outcome.result.stdout == "1\n2\n" + mine

    def test_trust_of_what_a_task_calls_work(self, make: Callable[..., Sandbox]) -> None:
        _needs_own_base(make)
        command = "ls /usr/local/bin/tool /usr/local/bin/../lib/x /etc/app.conf /etc/other"
        for fresh in (False, True):
            task = _task(command, work=["/usr/local/bin", "/etc/app.conf"], fresh=fresh)
            sandbox = make(task)
            sandbox.run(
                "mkdir -p /usr/local/bin /usr/local/lib; echo >/usr/local/bin/tool; echo >/usr/local/lib/x; "
                "echo >/etc/app.conf; echo >/etc/other",
                check=True,
            )
            outcome = sandbox.grade()
            assert outcome.result is not None
            assert outcome.result.stdout.split() == ["/etc/app.conf", "/usr/local/bin/tool"], fresh
            assert "/etc/other" in outcome.put_back
            assert any(name.startswith("/usr/local/lib") for name in outcome.put_back)
