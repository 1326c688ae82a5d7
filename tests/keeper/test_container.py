"""The keeper as a container's first process, and sessions that outlive their streams."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rlsandbox.errors import SandboxDiedError
from rlsandbox.keeper import durable, records
from rlsandbox.keeper.client import KeeperClient
from rlsandbox.keeper.durable import Durable, Raw
from rlsandbox.reset.facts import Facts
from tests.support.container import Container, container, dial, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
TOKEN = "t" * 32
LIMITS = ("--memory", str(256 << 20), "--disk", str(64 << 20), "--pids", "200", "--network", "none")


class Seat:
    """A client in its seat."""

    def __init__(self, made: Container, stream: Durable, client: KeeperClient) -> None:
        self.made, self.stream, self.client = made, stream, client

    async def sh(self, text: str, **fields: object) -> tuple[int, bytes]:
        out = bytearray()
        argv, env = ["/bin/sh", "-c", text], ["PATH=/usr/bin:/bin"]
        channel = self.client.command(argv, env=env, sink=lambda _, piece, __: out.extend(piece), **fields)
        end = await channel.wait_exit()
        return end.exit_code, bytes(out)

    def cut(self) -> None:
        """End every bridge as a broken network would: at once."""
        mine = str(self.made.run)
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    line = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\0")
                except OSError:
                    continue
                if b"connect" in line and mine.encode() in line and line[0].endswith(b"keeper"):
                    os.kill(int(entry), signal.SIGKILL)


@asynccontextmanager
async def seat(made: Container, **how: object) -> AsyncIterator[Seat]:
    stream = await Durable.open(lambda: dial(made), token=TOKEN, **how)
    client = await KeeperClient.open(*stream.streams(), member="x")
    yield Seat(made, stream, client)
    await client.aclose()
    await stream.wait_closed()


def test_facts_asked_for_behind_a_reset_are_the_next_episodes() -> None:
    async def main() -> None:
        async with container("own-users", *LIMITS) as made, seat(made) as s:
            before = Facts.of_lines(await s.client.inspect()).of("episode")
            await s.sh("echo x > /tmp/dirt; (sleep 99 &)")
            assert not Facts.of_lines(await s.client.inspect()).files_clean
            after = Facts.of_lines(await (await s.client.reset_and_look())())
            assert after.files_clean and not after.of("process")
            assert int(after.of("episode")[0]) == int(before[0]) + 1

    asyncio.run(main())


def test_a_transport_that_nobody_needs_is_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "PING_S", 0.05)
    monkeypatch.setattr(durable, "REST_S", 0.1)
    wanted, dials = True, 0

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.01)

    async def main() -> None:
        nonlocal wanted, dials

        async def dialled() -> Raw:
            nonlocal dials
            dials += 1
            return await dial(made)

        async with container("own-users", *LIMITS, "--grace", "1") as made:
            stream = await Durable.open(dialled, token=TOKEN, rest=lambda: wanted)
            client = await KeeperClient.open(*stream.streams(), member="x")
            s = Seat(made, stream, client)
            await s.sh("echo kept > /tmp/kept; (while :; do date +%s%N > /tmp/alive; sleep 0.1; done) > /dev/null 2>&1 &")
            await until(lambda: stream.resting)
            assert (dials, stream.rests, stream.cuts) == (1, 1, 0) and stream.away
            await asyncio.sleep(1.5)  # longer than the keeper's grace for a client that was cut off
            first = await client.read("/tmp/alive")
            assert await client.read("/tmp/kept") == b"kept\n" and dials == 2
            await s.sh("sleep 0.3")
            assert await client.read("/tmp/alive") != first, "what ran was ended"
            # A command that says nothing is under way all the same.
            running = asyncio.ensure_future(s.sh("sleep 1; echo done"))
            await until(lambda: not stream.resting)
            rests = stream.rests
            assert (await running)[1] == b"done\n" and stream.rests == rests
            wanted = False
            await client.ping()
            rests = stream.rests
            await asyncio.sleep(0.5)
            assert stream.rests == rests, "closed although it was to stay open"
            wanted = True
            await until(lambda: stream.resting)
            answers = await asyncio.gather(*(client.read("/tmp/kept") for _ in range(20)))
            assert set(answers) == {b"kept\n"} and stream.cuts == 0
            await client.aclose()
            await stream.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["own-users", "plain"])
def test_modes_are_found_by_doing_and_the_view_is_closed(kind: str) -> None:
    async def main() -> None:
        async with container(kind, *LIMITS) as made, seat(made) as s:
            assert s.client.welcome.mode in ("overlay", "userns") and s.stream.facts["workdir"] == "/"
            _, out = await s.sh(f"ls -a {made.run} 2>/dev/null | wc -l; grep -c {made.run} /proc/net/unix; grep CapEff /proc/self/status")
            seen, sockets, _, caps = out.split()
            assert int(seen) <= 2 and sockets == b"0"
            assert int(caps, 16) >> 21 & 1 == 0, "an episode has SYS_ADMIN"
            await s.sh("echo dirt > /var/tmp/dirt; mkdir /etc/dirt")
            await s.client.reset("")
            assert await s.sh("ls -d /var/tmp/dirt /etc/dirt 2>/dev/null") == (2, b"")

    asyncio.run(main())


def test_what_only_the_machines_root_may_read_is_covered() -> None:
    """The root of a container is that one, to /proc: its slabs, its pages, the addresses of its kernel."""
    names = [one.name for one in os.scandir("/proc") if one.is_file(follow_symlinks=False)]
    told = [name for name in names if name.startswith("key") or not os.stat(f"/proc/{name}").st_mode & 0o004]
    look = "cd /proc; for f in " + " ".join(told) + "; do head -c 1 $f 2>/dev/null | grep -q . && echo $f; done; true"

    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            assert s.client.welcome.mode == "userns"
            for _ in range(2):
                assert await s.sh(look) == (0, b"")
                await s.client.reset("")
            where = f"/proc/{made.pid}/root"
            plain = subprocess.run(["sh", "-c", look.replace("/proc", f"{where}/proc", 1)], capture_output=True)
            assert b"vmallocinfo" in plain.stdout, "control: the container's root does read them"

    asyncio.run(main())


def test_replace_where_nothing_better_works_and_why() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS, "--mode", "replace") as made, seat(made) as s:
            assert s.client.welcome.mode == "replace"
            assert (await s.sh("echo x"))[1] == b"x\n"

    asyncio.run(main())


def test_rights_over_the_node_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="SYS_ADMIN over the node"):
            async with container("node"):
                raise AssertionError("it started")

    asyncio.run(main())


def test_cut_streams_neither_lose_nor_repeat() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            run = asyncio.create_task(s.sh("i=0; while [ $i -lt 200000 ]; do echo line $i; i=$((i+1)); done; echo once >> /var/tmp/rls-n"))
            up = asyncio.create_task(s.client.write("/var/tmp/rls-up", bytes(range(256)) * 8192))
            for _ in range(12):
                await asyncio.sleep(0.05)
                s.cut()
            code, out = await run
            assert code == 0 and out == b"".join(b"line %d\n" % i for i in range(200000))
            await up
            sent = hashlib.md5(bytes(range(256)) * 8192).hexdigest()
            assert (await s.sh("cat /var/tmp/rls-n; md5sum < /var/tmp/rls-up"))[1] == f"once\n{sent}  -\n".encode()
            assert s.stream.cuts > 0

    asyncio.run(main())


def test_a_command_outlives_a_cut_and_ends_once() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            run = asyncio.create_task(s.sh("echo begun; sleep 1; echo x >> /var/tmp/rls-once; cat /var/tmp/rls-once; exit 3"))
            await asyncio.sleep(0.2)
            s.cut()
            assert await run == (3, b"begun\nx\n")

    asyncio.run(main())


def test_after_the_grace_all_is_ended_and_the_next_one_is_told() -> None:
    mark = f"7{os.getpid()}.25"

    def alive() -> bool:
        return subprocess.run(["pgrep", "-f", f"sleep {mark}$"], capture_output=True).returncode == 0

    async def main() -> None:
        async with container("plain", *LIMITS, "--grace", "1") as made:
            stream = await Durable.open(lambda: dial(made), token=TOKEN)
            client = await KeeperClient.open(*stream.streams(), member="x")
            await client.spawn(["/bin/sleep", mark], env=["PATH=/bin"])
            await client.write("/var/tmp/rls-left", b"x")
            assert alive()
            session, got = stream._session, stream._got
            stream.abort()
            await stream.wait_closed()
            for _ in range(200):
                if not alive():
                    break
                await asyncio.sleep(0.05)
            assert not alive()
            again = Durable(lambda: dial(made), token=TOKEN)
            again._session, again._got = session, got
            with pytest.raises(SandboxDiedError, match="what ran was ended") as caught:
                await again._attach()
            assert caught.value.kind == "grace_over"
            async with seat(made) as s:
                assert (await s.sh("cat /var/tmp/rls-left"))[0] == 1

    asyncio.run(main())


def test_another_session_begins_afresh() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made:
            async with seat(made) as first:
                await first.sh("echo x > /var/tmp/rls-left")
            async with seat(made) as second:
                assert (await second.sh("cat /var/tmp/rls-left"))[0] == 1

    asyncio.run(main())


def test_only_who_came_first_may_come_again() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            with pytest.raises(SandboxDiedError, match="somebody else") as caught:
                await Durable.open(lambda: dial(made), token="u" * 32)
            assert caught.value.kind == "token"
            with pytest.raises(SandboxDiedError, match="too short"):
                await Durable.open(lambda: dial(made), token="")
            assert (await s.sh("echo still"))[1] == b"still\n"

    asyncio.run(main())


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\xff" * 64,
        struct.pack("<IB3xQ", 40000, 1, 0),
        records.record(records.Kind.BYTES, b"x" * 100, 0),
        records.record(records.Kind.ATTACH, b"\x01", 0),
        records.record(records.Kind.ATTACH, b"", 1 << 63),
        records.record(99, b"", 0),
    ],
)
def test_what_makes_no_sense_ends_its_stream_only(bytes_: bytes) -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            raw = await dial(made)
            await raw.send(bytes_)
            while await raw.recv():
                pass  # a word why, perhaps; then the end
            await raw.close()
            assert (await s.sh("echo still"))[1] == b"still\n"

    asyncio.run(main())


def test_the_bridge_ends_with_its_stdin() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made:
            raw = await dial(made)
            assert raw.process.stdin is not None
            raw.process.stdin.close()
            assert await asyncio.wait_for(raw.process.wait(), 5) == 0

    asyncio.run(main())


def test_the_death_of_the_keeper_is_the_containers_end() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            run = asyncio.create_task(s.sh("sleep 60"))
            await asyncio.sleep(0.2)
            os.kill(made.pid, signal.SIGTERM)
            with pytest.raises(SandboxDiedError):
                await run

    asyncio.run(main())


def test_a_keeper_that_cannot_be_reached_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits asks the keeper for a sign of life; while the way to it is cut no sign says nothing."""
    monkeypatch.setattr("rlsandbox.keeper.liveness.EVERY_S", 0.3)

    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            reached = asyncio.Event()
            reached.set()

            async def dial_when_reached() -> object:
                await reached.wait()
                return await dial(made)

            s.stream._dial = dial_when_reached
            run = asyncio.create_task(s.sh("sleep 1; echo x"))
            await asyncio.sleep(0.2)
            reached.clear()
            s.cut()
            await asyncio.sleep(2)
            assert not run.done() and s.client.away
            reached.set()
            assert await run == (0, b"x\n")

    asyncio.run(main())


def test_a_stream_can_be_handed_on_and_back() -> None:
    async def main() -> None:
        async with container("plain", *LIMITS) as made, seat(made) as s:
            await s.sh("echo one > /tmp/rls-state")
            for _ in range(2):
                welcome, taken = s.client.welcome, s.client.detach()
                streams = await asyncio.open_connection(sock=taken)  # as another process would
                s.client = await KeeperClient.open(*streams, member="x", welcome=welcome)
                assert await s.sh("cat /tmp/rls-state") == (0, b"one\n")
                s.cut()
                assert (await s.sh("head -c 3000000 /dev/zero | wc -c"))[1].strip() == b"3000000"
                if _ == 0:
                    await s.client.aclose()  # the pair ends, and with it the session
                    await s.stream.wait_closed()
                    assert s.stream.is_closing()
                    s.stream = await Durable.open(lambda: dial(made), token=TOKEN)
                    s.client = await KeeperClient.open(*s.stream.streams(), member="x")
                    await s.sh("echo one > /tmp/rls-state")

    asyncio.run(main())
