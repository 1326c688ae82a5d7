"""Conformance: commands that are talked to while they run."""

from __future__ import annotations

import time

import pytest

from .. import errors
from ..sandbox import Sandbox
from ._commands import LONG
from ._fixtures import Fixtures, Grown, gone


class Popens(Fixtures):
    def test_popen_streams_as_it_comes(self, sandbox: Sandbox) -> None:
        with sandbox.popen("echo first; read x; echo got $x; exit 4") as p:
            chunks = iter(p)
            assert next(chunks) == ("stdout", b"first\n")
            assert p.poll() is None
            assert p.pid > 0
            p.write("more\n")
            assert b"".join(data for _, data in chunks) == b"got more\n"
            r = p.wait()
        assert (r.exit_code, r.stdout, p.exit_code) == (4, "first\ngot more\n", 4)

    def test_on_output_as_it_comes(self, sandbox: Sandbox) -> None:
        seen: list[tuple[str, bytes, float]] = []
        r = sandbox.run(
            "echo a; sleep 0.5; echo b >&2",
            on_output=lambda stream, data: seen.append((stream, data, time.monotonic())),
        )
        assert [(s, d) for s, d, _ in seen] == [("stdout", b"a\n"), ("stderr", b"b\n")]
        assert seen[1][2] - seen[0][2] > 0.2
        assert r.text == "a\nb\n"

    def test_on_output_that_raises(self, sandbox: Sandbox) -> None:
        def broken(stream: str, data: bytes) -> None:
            raise LookupError("from the callback")

        with pytest.raises(LookupError, match="from the callback"):
            sandbox.run(f"echo $$ >/tmp/p; echo x; sleep {LONG}", on_output=broken)
        assert gone(sandbox, sandbox.read_text("/tmp/p"))

    def test_popen_waits_for_its_reader(self, sandbox: Sandbox) -> None:
        grown = Grown()
        with sandbox.popen("head -c 50000000 /dev/zero") as p:
            time.sleep(0.3)
            assert p.poll() is None
            assert sum(len(data) for _, data in p) == 50_000_000
        assert grown() < 32 << 20

    def test_popen_killed_on_leaving(self, sandbox: Sandbox) -> None:
        with sandbox.popen(f"sleep {LONG} & echo $! $$; wait") as p:
            pids = next(iter(p))[1].decode()
        assert gone(sandbox, pids)
        assert p.exit_code == 137

    def test_popen_signals(self, sandbox: Sandbox) -> None:
        with sandbox.popen("trap 'echo caught; exit 9' TERM; echo up; while :; do sleep 0.05; done") as p:
            chunks = iter(p)
            assert next(chunks)[1] == b"up\n"
            p.kill(15)
            assert next(chunks)[1] == b"caught\n"
            assert p.wait(LONG).exit_code == 9
        with sandbox.popen(f"sleep {LONG}") as p:
            p.kill()
            r = p.wait(LONG)
        assert (r.exit_code, r.signal) == (137, 9)

    def test_popen_wait_with_timeout(self, sandbox: Sandbox) -> None:
        with sandbox.popen(["cat"]) as p:
            with pytest.raises(errors.CommandTimeoutError, match="still runs"):
                p.wait(0.1)
            p.write("on")
            p.close_stdin()
            assert p.wait(LONG).stdout == "on"

    def test_popen_does_not_start(self, sandbox: Sandbox) -> None:
        with pytest.raises(errors.CommandStartError):
            sandbox.popen(["/no/such/program"])

    def test_popen_after_its_end(self, sandbox: Sandbox) -> None:
        with sandbox.popen(["true"]) as p:
            assert p.wait(LONG).ok
            with pytest.raises(BrokenPipeError):
                p.write("x")
            p.kill()
            assert p.wait().ok
