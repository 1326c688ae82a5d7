"""Conformance: commands. Every line is a promise of ``Sandbox.run`` and ``popen`` with its right value."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable

import pytest

from .. import errors
from .._portal import Portal
from ..keeper.frames import encode
from ..keeper.wire import Type
from ..sandbox import Sandbox
from ..spec import Limits, Spec
from ..task import Task
from ._fixtures import Fixtures, Grown, cancelled_when, gone, inner

LONG = 300  # seconds that no test waits: what is "back at once" must not be near it


class Commands(Fixtures):
    # -- what a result is ---------------------------------------------------------------------------

    def test_bytes_that_are_no_text(self, sandbox: Sandbox) -> None:
        r = sandbox.run(r"printf '\377\n'")
        assert (r.exit_code, r.stdout_bytes, r.stdout) == (0, b"\xff\n", "�\n")

    def test_stdout_and_stderr_apart(self, sandbox: Sandbox) -> None:
        r = sandbox.run("echo out; echo err >&2")
        assert (r.stdout, r.stderr, r.ok) == ("out\n", "err\n", True)
        assert sorted(r.text.splitlines()) == ["err", "out"]

    def test_text_in_order_of_arrival(self, sandbox: Sandbox) -> None:
        r = sandbox.run("echo 1; sleep 0.2; echo 2 >&2; sleep 0.2; echo 3")
        assert r.text == "1\n2\n3\n"
        # Whatever the share of the limit that a stream has used by then.
        r = sandbox.run("printf 12345678; sleep 0.2; echo end >&2; sleep 0.2; echo", output_limit=9)
        assert (r.text, r.truncated) == ("12345678end\n\n", False)
        r = sandbox.run("seq 1 100000; sleep 0.2; echo end >&2")
        assert (r.text[-10:], r.truncated) == ("00000\nend\n", False)

    def test_characters_cut_by_frame_edges(self, sandbox: Sandbox) -> None:
        r = sandbox.run(r"i=0; while [ $i -lt 5000 ]; do printf '\303'; printf '\251'; i=$((i+1)); done")
        assert r.stdout == "é" * 5000
        assert r.text == "é" * 5000

    def test_nul_bytes_in_output(self, sandbox: Sandbox) -> None:
        r = sandbox.run(r"printf 'a\0b\0'")
        assert r.stdout_bytes == b"a\0b\0"
        assert r.stdout == "a\0b\0"

    def test_nul_bytes_in_a_command(self, sandbox: Sandbox) -> None:
        for cmd in ("echo a\0b", ["echo", "a\0b"]):
            with pytest.raises(errors.ConfigError, match="NUL"):
                sandbox.run(cmd)

    def test_duration(self, sandbox: Sandbox) -> None:
        assert 0.2 <= sandbox.run("sleep 0.2").duration_s < LONG

    # -- much output --------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [20_000_000, 300_000_000])
    def test_much_output(self, sandbox: Sandbox, size: int) -> None:
        grown = Grown()
        r = sandbox.run(f"head -c {size} /dev/zero", timeout=LONG)
        assert (r.exit_code, r.truncated, r.stdout_size) == (0, True, size)
        assert len(r.stdout_bytes) < (1 << 20) + 200
        assert grown() < 64 << 20

    def test_much_output_to_both(self, sandbox: Sandbox) -> None:
        r = sandbox.run("head -c 9000000 /dev/zero & head -c 8000000 /dev/zero >&2; wait", timeout=LONG)
        assert (r.exit_code, r.stdout_size, r.stderr_size) == (0, 9_000_000, 8_000_000)

    def test_head_and_tail_with_a_marker(self, sandbox: Sandbox) -> None:
        r = sandbox.run("seq 1 3000000", timeout=LONG)
        full = "".join(f"{i}\n" for i in range(1, 3_000_001))
        head, _, rest = r.stdout.partition("\n[... ")
        omitted, _, tail = rest.partition(" bytes left out ...]\n")
        assert r.truncated
        assert r.stdout_size == len(full)
        assert full.startswith(head)
        assert full.endswith(tail)
        assert len(head) + len(tail) + int(omitted) == len(full)
        assert len(head) == len(tail) == 1 << 19

    def test_output_limit(self, sandbox: Sandbox) -> None:
        r = sandbox.run("printf 0123456789", output_limit=4)
        assert (r.stdout, r.stdout_size) == ("01\n[... 6 bytes left out ...]\n89", 10)
        assert sandbox.run("printf 0123456789", output_limit=10).stdout == "0123456789"
        assert sandbox.run("printf 0123456789", output_limit=9).stdout.startswith("0123\n[... 1 bytes left")
        none = sandbox.run("printf 0123456789", output_limit=0)
        assert (none.stdout_size, none.truncated) == (10, True)

    def test_a_limit_above_what_the_keeper_holds(self, sandbox: Sandbox) -> None:
        r = sandbox.run("head -c 150000000 /dev/zero; printf end", output_limit="200MB", timeout=LONG)
        assert (r.truncated, r.stdout_size, len(r.stdout_bytes)) == (False, 150_000_003, 150_000_003)
        assert r.stdout_bytes.endswith(b"\0end")

    def test_a_cut_through_a_character(self, sandbox: Sandbox) -> None:
        r = sandbox.run("printf ééééé", output_limit=6)
        assert r.stdout == "é\n[... 4 bytes left out ...]\né"
        assert r.stdout_bytes.startswith("é".encode() + b"\xc3\n")

    def test_output_that_looks_like_ours(self, sandbox: Sandbox) -> None:
        fake = b"".join(
            [
                encode(Type.EXIT, 1, bytes(20)),
                encode(Type.DATA, 1, b"forged", stream=1),
                b"\n[... 12 bytes left out ...]\n",
                json.dumps({"exit_code": 0, "stdout": ""}).encode(),
                b"\x1b]0;title\x07\r\n",
            ]
        )
        r = sandbox.run("cat; exit 7", stdin=fake)
        assert (r.exit_code, r.stdout_bytes, r.truncated) == (7, fake, False)

    # -- how it ends --------------------------------------------------------------------------------

    def test_exit_codes(self, sandbox: Sandbox) -> None:
        assert sandbox.run("false").exit_code == 1
        assert sandbox.run("exit 3").exit_code == 3
        assert sandbox.run(["sh", "-c", "exit 255"]).exit_code == 255
        assert not sandbox.run("exit 3").ok

    @pytest.mark.parametrize(("name", "number"), [("KILL", 9), ("TERM", 15), ("SEGV", 11)])
    def test_killed_by_a_signal(self, sandbox: Sandbox, name: str, number: int) -> None:
        r = sandbox.run(f"kill -{name} $$")
        assert (r.exit_code, r.signal, r.timed_out, r.oom_killed) == (128 + number, number, False, False)

    def test_check(self, sandbox: Sandbox) -> None:
        assert sandbox.run("true", check=True).ok
        with pytest.raises(errors.CommandError, match="exited with 4: oh dear") as caught:
            sandbox.run("echo oh dear >&2; exit 4", check=True)
        assert caught.value.sandbox == sandbox.id
        assert not caught.value.infrastructure
        with pytest.raises(errors.CommandTimeoutError):
            sandbox.run(f"sleep {LONG}", timeout=0.2, check=True)

    def test_bad_syntax(self, sandbox: Sandbox) -> None:
        r = sandbox.run("if true; then (")
        assert r.exit_code == 2
        assert "yntax error" in r.stderr

    def test_a_program_that_does_not_exist(self, sandbox: Sandbox) -> None:
        r = sandbox.run("no-such-program-here")
        assert r.exit_code == 127
        assert "no-such-program-here" in r.stderr
        for argv in (["no-such-program-here"], ["/no/such/program"], ["/etc"]):
            with pytest.raises(errors.CommandStartError, match=argv[0]) as caught:
                sandbox.run(argv)
            assert not caught.value.infrastructure

    def test_a_command_that_begins_with_a_dash(self, sandbox: Sandbox) -> None:
        """As a model's list of commands does: the shell looks for it, and does not take it for an option."""
        for cmd in ("-c 'exit 3'", "- ls", "-e", "+x", "--help"):
            assert sandbox.run(cmd).exit_code == 127, cmd
        with sandbox.session() as sh:
            assert sh.run("-x; (exit 4)").exit_code == 4
            assert sh.run("-x").exit_code == 127
            assert "x" not in sh.run("echo $-").stdout

    def test_a_cwd_that_does_not_exist(self, sandbox: Sandbox) -> None:
        with pytest.raises(errors.CommandStartError, match="could not be started"):
            sandbox.run("true", cwd="/no/such/directory")

    def test_nonsense_is_refused(self, sandbox: Sandbox) -> None:
        for cmd in ([], 3, None, b"true", ["true", 3]):
            with pytest.raises(errors.ConfigError):
                sandbox.run(cmd)  # type: ignore[arg-type]
        for timeout in (0, -1, "5", float("nan")):
            with pytest.raises(errors.ConfigError):
                sandbox.run("true", timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigError):
            sandbox.run("true", env={"A=B": "c"})
        wrong: list[Callable[[], object]] = [
            lambda: sandbox.run("true", env=["A=b"]),  # type: ignore[arg-type]
            lambda: sandbox.run("cat", stdin=5),  # type: ignore[arg-type]
            lambda: sandbox.write_file("/tmp/x", 5),  # type: ignore[arg-type]
            lambda: sandbox.write_file("/tmp/x", "y", mode="rw"),  # type: ignore[arg-type]
            lambda: sandbox.grade("true"),  # type: ignore[arg-type]
            lambda: sandbox.run("echo \ud800"),  # half a character, as a model's JSON may hold it
            lambda: sandbox.run(["echo", "\ud800"]),
            lambda: sandbox.run("true", env={"A": "\ud800"}),
            lambda: sandbox.run("cat", stdin="\ud800"),
            lambda: sandbox.write_file("/tmp/x", "\ud800"),
            lambda: sandbox.read_file("/tmp/\ud800"),
            lambda: sandbox.read_file(5),  # type: ignore[arg-type]
            lambda: sandbox.run("true", cwd=b"/"),  # type: ignore[arg-type]
            lambda: sandbox.upload("/etc/hostname", "/tmp/x", exclude=[5]),  # type: ignore[list-item]
            lambda: sandbox.upload("/etc/hostname", "/tmp/x", progress=5),  # type: ignore[arg-type]
            lambda: sandbox.download("/etc/passwd", "/no/such", progress=5),  # type: ignore[arg-type]
            lambda: sandbox.run("true", on_output=5),  # type: ignore[arg-type]
            lambda: sandbox.run("cat", stdin=5, on_output=print),  # type: ignore[arg-type]
            lambda: sandbox.run("true", user=""),  # would be whoever commands run as without one
            lambda: sandbox.run("true", user=-1),  # type: ignore[arg-type]
            lambda: sandbox.run("true", user=True),  # type: ignore[arg-type]
            lambda: sandbox.run("true", user=["root"]),  # type: ignore[arg-type]
        ]
        for call in wrong:
            with pytest.raises(errors.ConfigError):
                call()
        assert inner(sandbox).processes == 0, "nothing was begun and left waiting"
        assert sandbox.list_dir("/tmp") == []

    def test_no_number_is_too_large(self, sandbox: Sandbox) -> None:
        for timeout in (1e10, 1e308, 10**30, float("inf")):
            assert sandbox.run("echo hi", timeout=timeout).stdout == "hi\n"
        assert sandbox.run("echo hi", output_limit=10**30).stdout == "hi\n"

    # -- what it is given ---------------------------------------------------------------------------

    def test_heredocs_and_quotes(self, sandbox: Sandbox) -> None:
        script = "cat <<'EOF'\n$HOME `x` \"'\\\nEOF\nprintf '%s\\n' \"it's\" 'a\"b' \\$x"
        assert sandbox.run(script).stdout == "$HOME `x` \"'\\\nit's\na\"b\n$x\n"

    @pytest.mark.parametrize("size", [131_000, 131_071, 131_072, 200_000, 3_000_000])
    def test_long_scripts(self, sandbox: Sandbox, size: int) -> None:
        script = "echo start\n"
        script += "#" + "x" * (size - len(script) - len("\necho end $#") - 1) + "\necho end $#"
        assert len(script) == size
        assert sandbox.run(script).stdout == "start\nend 0\n"

    def test_many_arguments(self, sandbox: Sandbox) -> None:
        r = sandbox.run(["sh", "-c", 'echo $# "${10000}"', "sh", *(str(i) for i in range(1, 10_001))])
        assert r.stdout == "10000 10000\n"

    def test_argv_is_not_for_the_shell(self, sandbox: Sandbox) -> None:
        r = sandbox.run(["printf", "%s|", "a b", "$HOME", "*", "", "it's"])
        assert r.stdout == "a b|$HOME|*||it's|"

    def test_cwd_and_env(self, sandbox: Sandbox) -> None:
        r = sandbox.run('pwd; echo "$A"', cwd="/usr", env={"A": "x y\nz"})
        assert r.stdout == "/usr\nx y\nz\n"
        assert sandbox.run('echo "${A-none}"').stdout == "none\n"

    def test_sensible_environment(self, sandbox: Sandbox) -> None:
        r = sandbox.run('echo "$HOME|${LC_CTYPE:-$LANG}|$PATH"')
        home, lang, path = r.stdout.strip().split("|")
        assert home.startswith("/")
        assert lang == "C.UTF-8"
        assert "/usr/bin" in path.split(":")

    def test_nothing_of_this_process(self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RLSANDBOX_TEST_SECRET", "leaked")
        assert "leaked" not in sandbox.run("env; cat /proc/*/environ 2>/dev/null").stdout

    def test_only_three_descriptors(self, sandbox: Sandbox) -> None:
        r = sandbox.run(["sh", "-c", "for i in 3 4 5 6 7 8 9; do [ -e /proc/$$/fd/$i ] && echo $i; done; :"])
        assert r.stdout == ""

    def test_no_stdin(self, sandbox: Sandbox) -> None:
        r = sandbox.run("read x; echo $?", timeout=LONG)
        assert (r.stdout, r.timed_out) == ("1\n", False)

    def test_stdin(self, sandbox: Sandbox) -> None:
        assert sandbox.run("cat", stdin="né\0\n").stdout_bytes == "né\0\n".encode()
        assert sandbox.run("cat", stdin=b"\xff\0").stdout_bytes == b"\xff\0"
        assert sandbox.run("cat", stdin="").stdout == ""

    def test_stdin_nobody_reads(self, sandbox: Sandbox) -> None:
        r = sandbox.run("exec <&-; sleep 0.2; echo done", stdin=b"x" * 5_000_000, timeout=LONG)
        assert (r.exit_code, r.stdout, r.timed_out) == (0, "done\n", False)
        assert sandbox.run("true", stdin=b"x" * 5_000_000, timeout=LONG).exit_code == 0

    def test_much_stdin_while_as_much_comes_out(self, sandbox: Sandbox) -> None:
        data = hashlib.sha256(b"x").digest() * (100_000_000 // 32)
        seen = hashlib.sha256()
        r = sandbox.run("cat", stdin=data, on_output=lambda stream, piece: seen.update(piece), timeout=LONG)
        assert (r.exit_code, r.stdout_size) == (0, len(data))
        assert seen.digest() == hashlib.sha256(data).digest()

    def test_user(self, sandbox: Sandbox) -> None:
        if inner(sandbox).one_uid:
            with pytest.raises(errors.UnsupportedError, match="one uid"):
                sandbox.run("true", user=self.other_user)
            return
        uid = sandbox.run("id -u; echo $HOME", user=self.other_user).stdout.split()[0]
        assert uid not in ("", "0")
        assert sandbox.run("id -u", user=uid).stdout.strip() == uid
        assert sandbox.run("id -u", user=f"{uid}:").stdout.strip() == uid  # as images have it
        assert sandbox.run("id -u", user=int(uid)).stdout.strip() == uid  # type: ignore[arg-type]
        with pytest.raises(errors.CommandStartError, match="could not be started"):
            sandbox.run("true", user="no-such-user")

    # -- children, time -----------------------------------------------------------------------------

    def test_a_background_child_lives_on(self, sandbox: Sandbox) -> None:
        start = time.monotonic()
        r = sandbox.run(f"sleep {LONG} & echo hi $!")
        assert time.monotonic() - start < LONG / 2
        hi, pid = r.stdout.split()
        assert (hi, r.exit_code) == ("hi", 0)
        assert not gone(sandbox, pid)

    def test_a_background_child_is_no_timeout(self, sandbox: Sandbox) -> None:
        r = sandbox.run(f"sleep {LONG} & echo $!", timeout=5)
        assert (r.exit_code, r.timed_out) == (0, False)
        assert not gone(sandbox, r.stdout)

    def test_a_background_child_that_prints_on(self, sandbox: Sandbox) -> None:
        r = sandbox.run("(while :; do echo noise; done) & echo $! >&2", timeout=LONG)
        assert r.exit_code == 0
        assert not gone(sandbox, r.stderr)  # it never saw a closed pipe

    @pytest.mark.parametrize(
        "child",
        [
            f"setsid sleep {LONG} & echo $! >p",
            f"(setsid sh -c 'echo $$ >p; sleep {LONG} & echo $! >>p; wait' &) ; wait",
            f"(trap '' TERM HUP INT; echo $$ >p; sleep {LONG}) & echo $! >>p",
            f"sleep {LONG} & echo $! >p; kill -STOP $!",
            f"(sleep {LONG} & echo $! >p)",
        ],
        ids=["setsid", "double-fork", "trap", "stopped", "orphan"],
    )
    def test_timeout_kills_the_tree(self, sandbox: Sandbox, child: str) -> None:
        r = sandbox.run(f"cd /tmp; rm -f p; {child}; trap '' TERM; echo up; sleep {LONG}", timeout=1.0)
        assert (r.timed_out, r.exit_code, r.ok, r.stdout) == (True, 137, False, "up\n")
        pids = sandbox.read_text("/tmp/p")
        assert pids.split()
        assert gone(sandbox, pids)

    def test_what_was_there_before_a_timeout_stays(self, sandbox: Sandbox) -> None:
        before = sandbox.run(f"sleep {LONG} & echo $!").stdout
        assert sandbox.run(f"sleep {LONG}", timeout=0.2).timed_out
        assert not gone(sandbox, before)

    def test_cancelled_call(self, sandbox: Sandbox, portal: Portal) -> None:
        script = f"cd /tmp; (setsid sh -c 'sleep 1; echo late >late' & echo $! >p); echo $$ >>p; sleep {LONG}"

        async def ready() -> bool:
            try:
                return (await inner(sandbox).read_text("/tmp/p")).count("\n") == 2
            except FileNotFoundError:
                return False

        cancelled_when(portal, lambda: inner(sandbox).run(script), ready)
        assert gone(sandbox, sandbox.read_text("/tmp/p"))
        time.sleep(1.2)  # the file would have come by now
        with pytest.raises(FileNotFoundError):
            sandbox.read_file("/tmp/late")

    def test_cancelled_at_every_instant(self, sandbox: Sandbox, portal: Portal) -> None:
        import asyncio

        async def run(ticks: int) -> None:
            task = asyncio.ensure_future(inner(sandbox).run("echo hi; sleep 0.001"))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            try:
                result = await task
            except asyncio.CancelledError:
                return
            assert result.stdout == "hi\n"

        for ticks in itertools.chain(range(30), range(30, 600, 40)):
            portal.call(run, ticks)
        assert inner(sandbox).processes == 0
        assert sandbox.run("echo fine").stdout == "fine\n"

    def test_no_hidden_deadline(self, sandbox: Sandbox) -> None:
        r = sandbox.run("sleep 65; echo done", timeout=120)
        assert (r.stdout, r.timed_out) == ("done\n", False)

    def test_the_task_s_limits_hold(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(Task(id="limits", limits=Limits(command=0.5, output="1KiB")))
        assert sandbox.run(f"sleep {LONG}").timed_out
        assert len(sandbox.run("seq 1 10000").stdout) < 1200
        assert not sandbox.run("sleep 0.7", timeout=LONG).timed_out

    def test_state_of_one_command_does_not_reach_the_next(self, sandbox: Sandbox) -> None:
        sandbox.run("set -e; cd /usr; export A=1; umask 077; ulimit -n 50; f() { :; }")
        r = sandbox.run('false; pwd; echo "${A-unset}"; umask; ulimit -n; command -v f || echo no f')
        lines = r.stdout.split("\n")
        assert lines[0] == sandbox.workdir
        assert lines[1] == "unset"
        assert lines[2] != "0077"
        assert lines[3] != "50"
        assert lines[4] == "no f"

    def test_printing_to_every_descriptor(self, sandbox: Sandbox) -> None:
        loop = "i=0; while [ $i -lt 256 ]; do printf junk >/proc/self/fd/$i; i=$((i+1)); done 2>/dev/null"
        r = sandbox.run(f"{loop}; exit 5")
        assert r.exit_code == 5
        assert set(r.stdout + r.stderr) <= set("junk")
        script = 'for i in 0 3 4 5 6 7 8 9; do eval "printf junk >&$i"; done 2>/dev/null; echo end; exit 6'
        assert (lambda r: (r.exit_code, r.stdout))(sandbox.run(script)) == (6, "end\n")

    def test_many_at_once(self, sandbox: Sandbox, portal: Portal) -> None:
        import asyncio

        async def all_of_them() -> None:
            runs = [inner(sandbox).run(f"seq {i} {i + 200}; exit {i % 50}") for i in range(100)]
            for i, r in enumerate(await asyncio.gather(*runs)):
                assert r.exit_code == i % 50
                assert r.stdout == "".join(f"{n}\n" for n in range(i, i + 201))

        portal.call(all_of_them)

    def test_out_of_memory(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(Task(id="memory", spec=Spec(memory="256MiB", disk="64MiB")))
        if sandbox.limits.means.get("memory", "none") == "none":
            pytest.skip("memory is not limited here, and the facts say so")
        r = sandbox.run("tail /dev/zero", timeout=LONG)
        assert (r.exit_code, r.oom_killed, r.timed_out) == (137, True, False)
        assert sandbox.run("echo alive").stdout == "alive\n"
