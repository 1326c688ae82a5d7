"""The local backend itself: lives and deaths of members and of the hub, and machines that allow less."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlsandbox import _paths
from rlsandbox.backends.local import Local
from rlsandbox.backends.local.ids import detect
from rlsandbox.backends.local.state import leftovers, reap
from rlsandbox.errors import ConfigError, ImageError, ProvisionError, SandboxDiedError, UnsupportedError
from rlsandbox.keeper.client import KeeperClient
from rlsandbox.spec import Spec
from tests.support.inside import Inside, inside

TREE = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The keeper and the base may come from the user's cache, as they would.
    monkeypatch.setenv("RLSANDBOX_CACHE", str(_paths.cache()))
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@asynccontextmanager
async def local(**options: str) -> AsyncIterator[Local]:
    backend = Local(**options)  # type: ignore[arg-type]
    try:
        yield backend
    finally:
        await backend.close()


def sleepers(seconds: str) -> list[int]:
    """Processes that are ``sleep <seconds>``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if Path("/proc", name, "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                    found.append(int(name))
            except OSError:
                continue
    return found


async def gone(pid: int) -> None:
    while os.path.exists(f"/proc/{pid}"):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z"):
            return
        await asyncio.sleep(0.01)


async def test_members_come_are_listed_and_go() -> None:
    async with local() as backend:
        assert await backend.list({}) == []
        one = await backend.provision(Spec(), member="one", labels={"run": "a", "n": "1"}, deadline=30)
        two = await backend.provision(Spec(), member="two", labels={"run": "b"}, deadline=30)
        assert one.node
        assert {member.id for member in await backend.list({})} == {"one", "two"}
        assert [member.id for member in await backend.list({"run": "a"})] == ["one"]
        assert [member.id for member in await backend.list({"run": "a", "n": "2"})] == []
        await backend.dispose(one)
        await backend.dispose(one)
        assert [member.id for member in await backend.list({})] == ["two"]
        with pytest.raises(SandboxDiedError):
            await backend.connect(one)
        await backend.dispose(two)


async def test_facts_say_what_holds() -> None:
    async with local() as backend, inside(backend, Spec(memory="256MiB", disk="64MiB", pids=50)) as box:
        facts = box.member.facts
        assert (facts["memory_bytes"], facts["disk_bytes"], facts["pids"]) == (
            str(256 << 20),
            str(64 << 20),
            "50",
        )
        assert facts["workdir"] == "/workspace"
        assert facts["ids"] in ("idmapped", "range", "one")
        assert facts["base"] == "host"
        assert await box.out("pwd", cwd=facts["workdir"]) == "/workspace"


async def test_a_stream_is_given_once() -> None:
    async with local() as backend:
        member = await backend.provision(Spec(), member="m", labels={}, deadline=30)
        _, writer = await backend.connect(member)
        with pytest.raises(SandboxDiedError, match="connected to before"):
            await backend.connect(member)
        writer.close()


async def test_bad_specs_make_nothing(tmp_path: Path) -> None:
    async with local() as backend:
        cases: list[tuple[Spec, type[Exception], str]] = [
            (Spec(expose=(str(tmp_path / "missing"),)), ConfigError, "does not exist"),
            (Spec(image=str(tmp_path / "missing.tar")), ImageError, "no such file"),
            (Spec(isolation="gvisor"), UnsupportedError, "no gvisor isolation"),
        ]
        for spec, error, message in cases:
            with pytest.raises(error, match=message):
                await backend.provision(spec, member="bad", labels={}, deadline=30)
        assert await backend.list({}) == []
        async with inside(backend, name="bad") as box:
            assert await box.out("echo fine") == "fine"


def test_bad_options_start_nothing(tmp_path: Path) -> None:
    for options in ({"isolation": "some"}, {"mode": "fast"}, {"upper": str(tmp_path / "missing")}):
        with pytest.raises(ConfigError, match="Local: "):
            Local(**options)  # type: ignore[arg-type]


async def test_exposed_paths_are_shown_and_cannot_be_written(tmp_path: Path) -> None:
    data = tmp_path / "data set"
    data.mkdir()
    (data / "file").write_text("from outside")
    spec = Spec(expose=(str(data), "python"))
    async with local() as backend, inside(backend, spec) as box:
        assert await box.out(f"cat '{data}/file'") == "from outside"
        code, _ = await box.sh(f"echo x > '{data}/new'")
        assert code != 0
        code, _ = await box.sh(f"rm '{data}/file'")
        assert code != 0
        assert (data / "file").exists()
        # The Python that runs these tests, with what is installed for it, first in PATH.
        assert await box.out("python3 -c 'import sys, pytest; print(sys.prefix)'") == sys.prefix


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_exposed_disks_that_cannot_map_ids_and_what_is_mounted_inside(tmp_path: Path) -> None:
    """As a network disk with a data set is: what everybody may read is shown, with the mounts in it."""
    for name in ("lower", "upper", "work", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower/inner").mkdir()
    (tmp_path / "lower/file").write_text("data\n")
    # An overlay cannot be mapped; a second one lies in it.
    over = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mounts = f"mount -t overlay o -o {over} {tmp_path}/data && mount -t tmpfs t {tmp_path}/data/inner && "
    mounts += f"echo inside > {tmp_path}/data/inner/file && "
    code = PROGRAM.replace("Spec()", f"Spec(expose=({str(tmp_path / 'data')!r},))").replace(
        "id -u; ls /home",
        f"cat {tmp_path}/data/file {tmp_path}/data/inner/file; touch {tmp_path}/data/inner/x 2>&1",
    )
    code = code.replace("await box.out(", "(await box.sh(").replace('2>&1")', '2>&1"))[1]')
    script = mounts + 'exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, code], capture_output=True, text=True, cwd=TREE
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.get("out", answer).startswith("data\ninside\n")
    assert "Read-only file system" in answer["out"]


async def test_a_base_can_be_an_image(tmp_path: Path) -> None:
    from tests.support import make_image

    if make_image.busybox() is None:
        pytest.skip(make_image.NO_BUSYBOX)
    path = make_image.docker_archive(
        tmp_path / "i.tar", [make_image.busybox_layer()], {"Env": ["A=b"], "User": "agent"}
    )
    async with local(base=str(path)) as backend, inside(backend) as box:
        assert box.env["A"] == "b"
        assert box.env["PATH"], "an image that names none gets one"
        assert await box.out("ls /usr/bin/busybox") == "/usr/bin/busybox"
        if box.member.facts["ids"] != "one":
            assert box.member.facts["user"] == "agent"


async def test_upper_layers_on_a_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    async with local(upper=str(disk)) as backend:
        async with inside(backend) as box:
            assert "disk_bytes" not in box.member.facts, "no size is held there"
            await box.out("head -c 5000000 /dev/zero > /workspace/file")
            (file,) = disk.rglob("file")
            assert file.stat().st_size == 5_000_000
            await box.client.reset()
            assert (await box.sh("test -e /workspace/file"))[0] == 1
        with pytest.raises(UnsupportedError, match="only a tmpfs has a size"):
            await backend.provision(Spec(disk="1MiB"), member="sized", labels={}, deadline=30)
    assert list(disk.iterdir()) == []


async def test_the_hub_killed_is_told_and_replaced() -> None:
    async with local() as backend:
        async with inside(backend) as box:
            hub = backend._hub
            assert hub is not None
            assert hub.process is not None
            hub.process.send_signal(signal.SIGKILL)
            error = await asyncio.wait_for(asyncio.shield(hub.lost), 60)
            assert "hub is gone" in str(error)
            code_or_error = await asyncio.gather(box.sh("echo x"), return_exceptions=True)
            assert isinstance(code_or_error[0], SandboxDiedError)
            assert await backend.list({}) == []
        async with inside(backend, name="next") as box:
            assert await box.out("echo again") == "again"


async def test_a_deadline_ends_the_wait(tmp_path: Path) -> None:
    async with local() as backend:
        with pytest.raises(ProvisionError, match="was not made within 0 s"):
            await backend.provision(Spec(), member="late", labels={}, deadline=0)
        assert await backend.list({}) == []


async def test_closing_twice_and_without_a_start(home: Path) -> None:
    backend = Local()
    await backend.close()
    await backend.close()
    assert not (home / "local").exists()
    async with local() as backend, inside(backend):
        assert len(list((home / "local").iterdir())) == 1
    assert list((home / "local").iterdir()) == []


async def test_unisolated_only_by_name(tmp_path: Path) -> None:
    async with local() as backend:
        async with inside(backend, name="isolated") as box:
            assert box.member.facts["isolation"] == "auto"
        bare = Spec(isolation="none")
        with pytest.warns(RuntimeWarning, match="commands run unisolated"):
            member = await backend.provision(bare, member="bare", labels={}, deadline=30)
        assert (member.facts["isolation"], member.facts["mode"]) == ("none", "replace")
        workdir = Path(member.facts["workdir"])
        client = await KeeperClient.open(*await backend.connect(member))
        box = Inside(backend, member, client, backend.environment(bare))
        assert await box.out("echo $$ > file; id -u; readlink /proc/self/ns/pid", cwd=str(workdir)) == (
            f"{os.getuid()}\n{os.readlink('/proc/self/ns/pid')}"
        ), "this is the machine itself"
        assert (workdir / "file").exists()
        deep = "import os\nfor n in range(3000):\n    os.mkdir('d', 0o700)\n    os.chdir('d')"
        await box.out(
            shlex.join([sys.executable, "-c", deep]), cwd=str(workdir)
        )  # Python's own rmtree gives up
        await box.client.spawn(["sleep", "4711.5"])
        assert sleepers("4711.5")
        await client.aclose()
        await backend.dispose(member)
        assert not workdir.exists()
        for pid in sleepers("4711.5"):
            await asyncio.wait_for(gone(pid), 60)
        with pytest.raises(UnsupportedError, match="an image cannot be used without isolation"):
            await backend.provision(
                Spec(isolation="none", image=str(tmp_path)), member="no", labels={}, deadline=30
            )


async def test_a_backend_without_isolation_says_so(tmp_path: Path) -> None:
    async with local(isolation="none") as backend:
        found = await backend.capabilities()
        assert found.reset_modes == {"replace"}
        assert not found.snapshot


VICTIM = """
import asyncio, os, sys
from rlsandbox.backends.local import Local
from rlsandbox.spec import Spec
from rlsandbox.keeper.client import KeeperClient
async def main():
    backend = Local(upper=sys.argv[2])
    member = await backend.provision(Spec(), member="victim", labels={}, deadline=60)
    client = await KeeperClient.open(*await backend.connect(member))
    script = f"sleep {sys.argv[1]} & setsid sleep {sys.argv[1]} & wait"
    await client.spawn(["/bin/sh", "-c", script], env=["PATH=/usr/bin:/bin"])
    child = os.fork() if "fork" in sys.argv else 0
    if "fork" in sys.argv and child == 0:
        os.close(1)
        import time
        time.sleep(600)
    print(backend._hub.process.pid, child, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize(("fork", "upper"), [(False, "tmpfs"), (True, "tmpfs"), (False, "disk")])
async def test_nothing_outlives_a_killed_client(home: Path, tmp_path: Path, fork: bool, upper: str) -> None:
    seconds = f"{5000 + os.getpid() % 1000}.{int(fork)}"
    place = tmp_path if upper == "disk" else upper
    victim = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", VICTIM, seconds, str(place), *(["fork"] if fork else [])),
        cwd=TREE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert victim.stdout is not None
    hub, child = map(int, (await victim.stdout.readline()).split())
    while len(sleepers(seconds)) < 2:
        await asyncio.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    await victim.wait()
    try:
        assert not fork or os.path.exists(f"/proc/{child}")
        await asyncio.wait_for(gone(hub), 60)
        for pid in sleepers(seconds):
            await asyncio.wait_for(gone(pid), 60)
        # (control groups of hubs that other tests have killed may be among them)
        (found,) = [item for item in leftovers(home) if item.path.is_relative_to(home)]
        assert found.pid == victim.pid
        assert len(list(tmp_path.glob("rlsandbox-*"))) == (upper == "disk")
        removed, _ = await reap(detect(), home)
        assert found.run in [item.run for item in removed]
        assert list(tmp_path.glob("rlsandbox-*")) == []
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
    assert [item for item in leftovers(home) if item.path.is_relative_to(home)] == []


# Machines that allow less. What forbids them here is a user namespace in which they are forbidden.

PROGRAM = """
import asyncio, json, sys
from rlsandbox.backends.local import Local
from rlsandbox.errors import SandboxError
from rlsandbox.spec import Spec
sys.path.insert(0, ".")
from tests.support.inside import Inside, inside
async def main():
    backend = Local()
    try:
        async with inside(backend, Spec()) as box:
            print(json.dumps({"ids": box.member.facts["ids"], "out": await box.out("id -u; ls /home")}))
    except SandboxError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
    finally:
        await backend.close()
asyncio.run(main())
"""


def unshared(script: str, code: str, **env: str) -> dict[str, object]:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare (util-linux) is missing")
    done = subprocess.run(
        [unshare, "-U", "-r", "sh", "-c", script + 'exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        cwd=TREE,
        env={**os.environ, **env},
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"no user namespace can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


FORBID = "echo 0 > /proc/sys/user/max_user_namespaces || exit 3; "


def test_forbidden_user_namespaces_name_what_to_set() -> None:
    answer = unshared(FORBID, PROGRAM)
    assert answer["error"] == "UnsupportedError"
    assert "user namespace" in str(answer["message"])
    assert "sysctl -w user.max_user_namespaces=65536" in str(answer["hint"])


def test_where_nothing_can_be_isolated_only_none_works() -> None:
    """... and an isolated sandbox is refused, whichever was asked for first."""
    bare = PROGRAM.replace("Spec()", 'Spec(isolation="none")').replace("ls /home", "echo here")
    answer = unshared(FORBID, bare)
    assert answer == {"ids": "host", "out": "0\nhere"}
    both = PROGRAM.replace(
        "async with",
        'await backend.provision(Spec(isolation="none"), member="x", labels={}, deadline=90)\n        async with',
    )
    answer = unshared(FORBID, both)
    assert answer["error"] == "UnsupportedError"
    assert "user.max_user_namespaces" in str(answer["hint"])


def test_doctor_where_user_namespaces_are_forbidden() -> None:
    code = "import sys; from rlsandbox.cli import main; print(); sys.stdout.flush(); s = main(['doctor', '--json']); print('{\"status\": %d}' % s)"
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare (util-linux) is missing")
    done = subprocess.run(
        [unshare, "-U", "-r", "sh", "-c", FORBID + 'exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        cwd=TREE,
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"no user namespace can be made here: {done.stderr.strip()}")
    text, _, status = done.stdout.rpartition("{")
    assert json.loads("{" + status) == {"status": 1}, done.stderr
    report = json.loads(text)
    assert report["works"] is False
    failed = {row["name"]: row for row in report["rows"] if row["status"] == "fail"}
    assert "user.max_user_namespaces=65536" in json.dumps(failed)
    assert all(row["fix"] for row in failed.values())


def test_a_root_with_one_id_only_still_works(tmp_path: Path) -> None:
    """As in a container that an ordinary user started without a range."""
    answer = unshared("", PROGRAM, RLSANDBOX_HOME=str(tmp_path / "one"))
    assert answer == {"ids": "one", "out": "0\nuser"}


def test_doctor_where_all_is_well() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from rlsandbox.cli import main; sys.exit(main(['doctor', '--json']))",
        ],
        capture_output=True,
        text=True,
        cwd=TREE,
    )
    report = json.loads(done.stdout)
    assert (done.returncode == 0) is report["works"]
    assert report["works"], [row for row in report["rows"] if row["status"] == "fail"]
    for row in report["rows"]:
        assert set(row) == {"name", "status", "found", "fix"}
        assert row["status"] == "ok" or row["fix"], f"what is not well comes with what to do: {row}"


AS_USER = """
import asyncio, json, sys
from rlsandbox.backends.local import Local
from rlsandbox.spec import Spec
from tests.support.inside import inside
async def main():
    backend = Local()
    found = {}
    try:
        for name, spec in (("host", Spec()), ("image", Spec(image=sys.argv[1]))):
            async with inside(backend, spec, name=name) as box:
                found["ids"] = box.member.facts["ids"]
                found[name] = await box.out("id -u; cat /proc/self/uid_map | wc -l; touch /root/x /workspace && echo wrote")
                if name == "image":
                    found["owners"] = await box.out("stat -c %u:%g /home/agent /opt/shared /usr/bin/busybox")
                    found["deleted"] = (await box.sh("test -e /opt/data/001"))[0]
                    if box.member.facts["ids"] != "one":
                        found["agent"] = await box.out("id -un; echo x > ~/f && stat -c %U ~/f", user="agent")
    finally:
        await backend.close()
    print(json.dumps(found))
asyncio.run(main())
"""


HIDDEN = 'mount --bind /dev/null "$(command -v {})"; '
WAYS = {
    "range": ("range", "", None),
    "range, found without PATH": ("range", "", "/nowhere"),
    "no range": ("one", "mount --bind /dev/null /etc/subuid; ", None),
    # (a mount in /usr/bin besides, which is bound as it is then)
    "no newuidmap": ("one", HIDDEN.format("newuidmap"), None),
    "no newgidmap": ("one", HIDDEN.format("newgidmap"), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_as_an_ordinary_user(way: str) -> None:
    from tests.support import make_image
    from tests.support.ordinary import USER, make_ordinary

    ids, hide, path = WAYS[way]
    if make_image.busybox() is None:
        pytest.skip(make_image.NO_BUSYBOX)
    has_range = any(line.startswith(f"{USER}:") for line in Path("/etc/subuid").read_text().splitlines())
    if way != "no range" and (shutil.which("newuidmap") is None or not has_range):
        pytest.skip("newuidmap (package uidmap) or the user's range in /etc/subuid is missing")
    layers = [make_image.busybox_layer(), make_image.many_files_layer(300), make_image.changes_layer()]
    through = (
        (shutil.which("unshare") or "unshare", "-m", "sh", "-c", hide + 'exec "$@"', "sh") if hide else ()
    )
    with make_ordinary() as ordinary:
        image = make_image.oci_layout(ordinary.place / "image", layers)
        done = ordinary.run("-c", AS_USER, str(image), path=path, through=through)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ids"] == ids
    assert found["host"].endswith("wrote")
    assert found["image"].endswith("wrote")
    assert found["deleted"] == 1
    if ids == "range":
        assert found["owners"] == "1000:1000\n0:50\n0:0"
        assert found["agent"] == "agent\nagent"
    else:
        assert found["owners"] == "0:0\n0:0\n0:0"


MOUNTS = """
import asyncio, json, time
from rlsandbox.backends.local import Local
from rlsandbox.spec import Spec
from tests.support.inside import inside
async def main():
    backend = Local()
    try:
        async with inside(backend, Spec()) as box:
            said = await box.out("cat /usr/src/mark; ls /usr/bin/env; touch /usr/share/x /usr/src/y && echo wrote")
            refused = (await box.sh("touch /usr/bin/x"))[1]
            await box.client.reset()
            left = await box.out("ls -d /usr/share/x /usr/src/y 2>/dev/null || echo clean")
            print(json.dumps([box.member.facts["reset_mode"], box.member.facts.get("read_only"), said, refused, left]))
    finally:
        await backend.close()
asyncio.run(main())
"""


def test_usr_with_mounts_in_it() -> None:
    """A disk of its own for /usr/src, and single files as container runtimes mount drivers into /usr/bin."""
    from tests.support.ordinary import make_ordinary

    script = (
        "mount -t tmpfs none /usr/src; echo local > /usr/src/mark; mount --bind /bin/true /usr/bin/env; "
        'exec "$@"'
    )
    with make_ordinary() as ordinary:
        through = (shutil.which("unshare") or "unshare", "-m", "sh", "-c", script, "sh")
        done = ordinary.run("-c", MOUNTS, through=through)
    assert done.returncode == 0, done.stdout + done.stderr
    mode, read_only, said, refused, left = json.loads(done.stdout)
    assert mode == "userns"
    assert "/usr/bin" in read_only.split(":")
    assert said.split() == ["local", "/usr/bin/env", "wrote"]
    assert "Read-only file system" in refused
    assert left == "clean"
