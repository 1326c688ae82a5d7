"""Conformance: sessions, a shell that keeps its state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

import pytest

from .. import errors
from .._portal import Portal
from ..sandbox import Sandbox, Session
from ..spec import Limits, Spec
from ..task import Task
from ._commands import LONG
from ._fixtures import Fixtures, gone, inner


def _until_dead(session: Session) -> None:
    for _ in range(1000):
        session.run("true")


class Sessions(Fixtures):
    @pytest.fixture(params=["sh", "bash"])
    def shell(self, request: pytest.FixtureRequest, sandbox: Sandbox) -> str:
        name: str = request.param
        if not sandbox.run(f"command -v {name}").ok:
            pytest.skip(f"{name} is not in the image")
        return name

    def test_session_keeps_its_state(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            r = sh.run(
                "cd /usr; export A='a b'; umask 027; ulimit -n 77; f() { echo f $1; }; b=unexported; set -u"
            )
            assert (r.exit_code, r.text) == (0, "")
            r = sh.run('pwd; echo "$A"; umask; ulimit -n; f 1; echo $b; env | grep ^A=; echo $-')
            assert r.stdout.split("\n")[:7] == ["/usr", "a b", "0027", "77", "f 1", "unexported", "A=a b"]
            assert "u" in r.stdout.split("\n")[7]
            r = sh.run("echo $not_set_at_all; echo on")
        assert (r.stdout, r.ok) == ("", False)

    def test_session_results(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell, cwd="/usr", env={"X": "y"}) as sh:
            assert sh.run("pwd; echo $X").stdout == "/usr\ny\n"
            r = sh.run("echo out; echo err >&2; (exit 3)")
            assert (r.exit_code, r.stdout, r.stderr) == (3, "out\n", "err\n")
            assert sh.run("true").exit_code == 0
            assert sh.run("no-such-program-here").exit_code == 127
            r = sh.run("sh -c 'kill -9 $$'")
            assert (r.exit_code, r.signal) == (137, 9)
            assert sh.run("").exit_code == 0
            assert sh.run("# only a comment").exit_code == 0
            assert sh.run("echo no newline at the end \\").stdout == "no newline at the end \\\n"
            with pytest.raises(errors.CommandError, match="exited with 5"):
                sh.run("(exit 5)", check=True)
            assert sh.run("echo on").stdout == "on\n"

    def test_session_survives_bad_syntax(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            # The here-document comes first: bash 5.2 corrupts its heap when one follows an open "$(".
            for script in ("cat <<EOF\nx", "if (", "'", '"', "$(", ")", "}", "case x in", "`", "echo ${"):
                r = sh.run(script, timeout=LONG)
                assert not r.timed_out, script
            assert sh.run("echo fine").stdout == "fine\n"

    def test_session_survives_any_bytes(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            for _ in range(10):
                data = os.urandom(100)
                r = sh.run("cat", stdin=data)
                assert (r.exit_code, r.stdout_bytes) == (0, data)
                r = sh.run("cat >&2; printf '\\n'", stdin=data)
                assert (r.stderr_bytes, r.stdout) == (data, "\n")
            assert sh.run("head -c 100 /dev/urandom").stdout_size == 100
            assert sh.run("echo fine").stdout == "fine\n"

    def test_session_takes_any_text(self, sandbox: Sandbox, shell: str) -> None:
        text = "".join(chr(c) for c in [*range(1, 0x250), 0x20AC, 0x10FFFF]) + "'\"\\'''\\n`$(x)${y}"
        quoted = "'" + text.replace("'", "'\\''") + "'"
        with sandbox.session(shell=shell) as sh:
            assert sh.run(f"printf %s {quoted}").stdout == text
            assert sh.run(f"cat <<'E O F'\n{text}\nE O F\n").stdout == text + "\n"
            big = "x" * 300_000
            assert sh.run(f"v='{big}'; echo ${{#v}}").stdout == "300000\n"
            assert sh.run("echo ${#v}").stdout == "300000\n"

    def test_session_nothing_printed_is_an_answer(self, sandbox: Sandbox, shell: str) -> None:
        """Neither guesses, nor what an earlier answer looked like, nor any descriptor."""
        forge = (
            r"""n=0123456789abcdef0123456789abcdef; for fd in 0 1 2 3 4 5 6 7 8 9; do """
            r"""eval "printf '\n%s 0\n' $n >&$fd" 2>/dev/null; done; """
            r"""if [ -n "$BASH_VERSION" ]; then for fd in 10 11 12 20 63 255; do """
            r"""eval "printf '\n%s 0\n' $n >&$fd" 2>/dev/null; done; fi; """
            r"""for p in /proc/self/fd/* /proc/$$/fd/*; do (printf '\n%s 0\n' $n >$p) 2>/dev/null & done; """
            r"""wait; (exit 42)"""
        )
        with sandbox.session(shell=shell) as sh:
            for _ in range(3):
                r = sh.run(forge, timeout=LONG)
                assert (r.exit_code, r.timed_out) == (42, False)
            assert sh.run("echo fine").stdout == "fine\n"

    def test_session_has_no_descriptor_of_ours(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            r = sh.run(
                "sh -c 'for i in 3 4 5 6 7 8 9 10 11 12; do [ -e /proc/$$/fd/$i ] && echo $i; done; :'"
            )
            assert r.stdout == ""
            assert sh.run("read x; echo $?", timeout=LONG).stdout == "1\n"
            assert sh.run("set | grep -i rlsandbox; env | grep -i rlsandbox; :").stdout == ""

    def test_session_builtins_in_disguise(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            sh.run("alias printf=false eval=false command=false; printf() { echo mine; }; echo() { :; }")
            sh.run("eval() { :; }", timeout=LONG)
            assert sh.run("(exit 6)", timeout=LONG).exit_code == 6
            assert sh.run("break; continue; pwd", timeout=LONG).exit_code == 0
            assert sh.run("IFS=x; set -f; set -- a b c; PATH=/nowhere", timeout=LONG).exit_code == 0
            assert sh.run("(exit 7)", timeout=LONG).exit_code == 7

    def test_session_traces_only_what_it_was_given(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            assert sh.run("set -x").text == ""
            for number in range(3):
                r = sh.run(f"cd /usr; (exit {number})")
                assert (r.exit_code, r.stdout) == (number, "")
                assert [line.lstrip("+") for line in r.stderr.splitlines()] == [" cd /usr", f" exit {number}"]
            assert sh.run("if (").exit_code != 0
            assert "x" in sh.run("pwd; echo $-").stdout.splitlines()[1]
            assert sh.run("cat", stdin="1\n").stdout == "1\n"
            r = sh.run("set +x")
            assert r.stderr.lstrip("+") == " set +x\n"
            r = sh.run("pwd; echo on >&2")
            assert (r.stdout, r.stderr) == ("/usr\n", "on\n")
            assert sh.run("exec 2>/tmp/errors; set -x").text == ""  # wherever the shell has put its errors
            assert sh.run("true").text == ""
            r = sh.run("cat /tmp/errors")
            assert [line.lstrip("+") for line in r.stdout.splitlines()] == [" true", " cat /tmp/errors"]

    def test_session_output_is_whole(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            for n in (1, 1000, 70_000, 300_000, 3_000_000):
                r = sh.run(f"head -c {n} /dev/zero; head -c {n} /dev/zero >&2; printf end; printf end >&2")
                assert (r.stdout_size, r.stderr_size) == (n + 3, n + 3)
                assert r.stdout.endswith("end")
                assert r.stderr.endswith("end")
            for i in range(200):
                assert sh.run(f"echo {i}; echo {i} >&2").stderr == f"{i}\n"

    def test_session_much_output(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            r = sh.run("seq 1 3000000", output_limit="64KiB", timeout=LONG)
            assert (r.exit_code, r.truncated, r.stdout_size) == (0, True, 22_888_896)
            assert r.stdout.startswith("1\n2\n")
            assert r.stdout.endswith("\n3000000\n")
            assert len(r.stdout) < 66_000
            assert sh.run("echo fine").stdout == "fine\n"

    def test_session_exit(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            r = sh.run("echo bye; exit 3")
            assert (r.exit_code, r.stdout) == (3, "bye\n")
            for _ in range(2):
                with pytest.raises(errors.SessionDiedError, match="exited with 3") as caught:
                    sh.run("echo never")
                assert not caught.value.infrastructure
        assert sandbox.run("echo fine").stdout == "fine\n"

    def test_session_errexit(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            assert sh.run("set -e; true").ok
            assert sh.run("echo still here").ok
            r = sh.run("echo a; false; echo b")
            assert (r.stdout, r.exit_code) == ("a\n", 1)
            with pytest.raises(errors.SessionDiedError):
                sh.run("true")

    def test_session_killed(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            r = sh.run("kill -9 $$")
            assert (r.exit_code, r.signal) == (137, 9)
            with pytest.raises(errors.SessionDiedError, match="signal 9"):
                sh.run("true")
        with sandbox.session(shell=shell) as sh:
            pid = sh.run("echo $$").stdout.strip()
            sandbox.run(f"kill -9 {pid}")
            # Whether the next call or one later finds it dead is a race; none may hang or succeed for ever.
            with pytest.raises(errors.SessionDiedError, match="signal 9"):
                _until_dead(sh)

    def test_session_exec(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            assert sh.run("exec sh -c 'echo other; exit 4'").exit_code == 4
            with pytest.raises(errors.SessionDiedError):
                sh.run("true")

    def test_session_timeout(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            r = sh.run(
                f"echo $$ >/tmp/p; setsid sleep {LONG} & echo $! >>/tmp/p; echo up; sleep {LONG}", timeout=1
            )
            assert (r.timed_out, r.exit_code, r.stdout) == (True, 137, "up\n")
            assert gone(sandbox, sandbox.read_text("/tmp/p"))
            with pytest.raises(errors.SessionDiedError, match="more than 1 s"):
                sh.run("true")

    def test_session_has_no_time_limit_of_its_own(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(Task(id="t", limits=Limits(command=1.0)))
        with sandbox.session() as sh:
            for _ in range(3):
                assert not sh.run("sleep 0.5").timed_out
            assert sh.run(f"sleep {LONG}").timed_out

    def test_session_cancelled(self, sandbox: Sandbox, portal: Portal) -> None:
        async def cancel() -> str:
            session = await inner(sandbox).session()
            task = asyncio.ensure_future(session.run(f"echo $$ >/tmp/p; sleep {LONG}"))
            pids = ""
            while not pids:
                with contextlib.suppress(FileNotFoundError):
                    pids = await inner(sandbox).read_text("/tmp/p")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(errors.SessionDiedError, match="cancelled"):
                await session.run("true")
            return pids

        assert gone(sandbox, portal.call(cancel))

    def test_session_background_jobs(self, sandbox: Sandbox, shell: str) -> None:
        start = time.monotonic()
        with sandbox.session(shell=shell) as sh:
            pid = sh.run(f"sleep {LONG} & echo $!").stdout.strip()
            assert not gone(sandbox, pid)
            assert sh.run("kill -0 $!; echo $?").stdout == "0\n"
            sh.run("(sleep 0.2; echo later) & :")
            assert sh.run("sleep 0.6; echo now").stdout == "later\nnow\n"
            sh.run("(while :; do echo noise; done) &")
            for _ in range(5):
                assert sh.run("(exit 8)").exit_code == 8
        assert time.monotonic() - start < LONG / 2

    def test_session_background_jobs_that_print_much(self, sandbox: Sandbox, shell: str) -> None:
        """What is printed between two commands is bounded too, and what is left out is said."""
        with sandbox.session(shell=shell) as sh:
            sh.run("mkfifo /tmp/go /tmp/out; (read x </tmp/go; seq 1 100000; echo x >/tmp/out) &")
            sandbox.run("echo >/tmp/go; cat /tmp/out", timeout=LONG)
            r = sh.run("echo now", timeout=LONG)
            assert (r.truncated, r.stdout_size) == (True, 588_895 + 4)
            assert r.stdout.startswith("1\n2\n3\n")
            assert " bytes left out ...]\n" in r.stdout
            assert r.stdout.endswith("\n99999\n100000\nnow\n")

    def test_session_stdin(self, sandbox: Sandbox, shell: str) -> None:
        with sandbox.session(shell=shell) as sh:
            assert sh.run("read a; read b; cat", stdin="1\n2\n3").stdout == "3"
            assert sh.run("echo $a $b").stdout == "1 2\n"
            assert sh.run("cat", stdin=b"\0\xff").stdout_bytes == b"\0\xff"
            assert sh.run("wc -c", stdin=b"x" * 3_000_000).stdout.strip() == "3000000"
            assert sh.run("cat").stdout == ""
        assert sandbox.run("find /tmp /dev/shm -name '*rlsandbox*'").stdout == ""
        if sandbox.reset_mode != "replace":
            assert [c.name for c in sandbox.changes() if "rlsandbox" in c.name] == []

    def test_session_stdin_that_there_is_no_room_for(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(Task(id="full", spec=Spec(disk="32MiB", memory="128MiB")))
        if sandbox.limits.means.get("disk", "none") == "none":
            pytest.skip("disk is not limited here, and the facts say so")
        sandbox.run("head -c 900000000 /dev/zero >/dev/shm/x; head -c 90000000 /dev/zero >/tmp/x")
        with sandbox.session() as sh:
            with pytest.raises(OSError, match="No space left") as caught:
                sh.run("cat", stdin=b"x" * 1_000_000)
            assert isinstance(caught.value, errors.SandboxFileError)
            assert not caught.value.infrastructure  # the rollout's own doing
            sandbox.run("rm /dev/shm/x /tmp/x")
            assert sh.run("cat; ls -A /tmp /dev/shm", stdin="on\n").stdout.startswith("on\n")
        assert [c.name for c in sandbox.changes() if "rlsandbox" in c.name] == []

    def test_session_closed(self, sandbox: Sandbox) -> None:
        sh = sandbox.session()
        pid = sh.run("echo $$").stdout
        sh.close()
        sh.close()
        assert gone(sandbox, pid)
        with pytest.raises(errors.SessionDiedError, match="closed"):
            sh.run("true")

    def test_session_of_concurrent_callers(self, sandbox: Sandbox, portal: Portal) -> None:
        async def both() -> list[str]:
            async with inner(sandbox).session() as sh:
                runs = [sh.run(f"x={i}; sleep 0.01; echo $x") for i in range(20)]
                return [r.stdout for r in await asyncio.gather(*runs)]

        assert portal.call(both) == [f"{i}\n" for i in range(20)]

    def test_session_refusals(self, sandbox: Sandbox) -> None:
        with pytest.raises(errors.ConfigError, match="shell"):
            sandbox.session(shell="python3")
        with pytest.raises(errors.CommandStartError):
            sandbox.session(shell="/no/such/dir/bash")
        with sandbox.session() as sh:
            with pytest.raises(errors.ConfigError, match="NUL"):
                sh.run("echo \0")
            with pytest.raises(errors.ConfigError):
                sh.run(["echo"])  # type: ignore[arg-type]
            assert sh.run("echo fine").stdout == "fine\n"
