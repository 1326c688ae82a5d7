"""What an episode can see and must not: files, environments, descriptors, the keeper, other sandboxes.

Each test has its positive control in itself: the same look, from where nothing hides what is looked for.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsandbox.spec import Spec
from tests.support import looks
from tests.support.host import compiled, on_host
from tests.support.place import Place, local, place

AS_ROOT = os.geteuid() == 0
MODES = ("overlay", "userns")
USERS = (None, "1000")
WALK = (
    "import os, sys\n"
    "top, word = sys.argv[1], sys.argv[2]\n"
    "for d, ds, fs in os.walk(top):\n"
    "    if d == top: ds[:] = [x for x in ds if x not in ('proc', 'sys')]\n"
    "    for n in (*ds, *fs):\n"
    "        if word in n: print(os.path.join(d, n))\n"
)


def needs_user(where: Place, user: str | None) -> None:
    if user is not None and where.client.welcome.facts.get("ids") == "one":
        pytest.skip("one uid only here: there is no other user")


@pytest.fixture
def canaries() -> Iterator[str]:
    """Files with one secret name, everywhere on this machine where this user may write."""
    word = "canary-" + secrets.token_hex(8)
    places = ["/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"), os.getcwd()]
    if AS_ROOT:
        places += [
            "/",
            "/root",
            "/home",
            "/srv",
            "/opt",
            "/mnt",
            "/var/lib",
            "/etc",
            "/boot",
            "/var/log",
            "/run",
        ]
    made = []
    for directory in dict.fromkeys(places):
        path = Path(directory) / word
        try:
            path.write_text(word)
        except OSError:
            continue
        made.append(path)
    yield word
    for path in made:
        path.unlink()


@pytest.mark.parametrize("mode", MODES)
def test_canaries_can_be_found_on_the_machine_itself(mode: str, canaries: str) -> None:
    found = on_host(["python3", "-c", WALK, "/tmp", canaries])
    assert f"/tmp/{canaries}" in found.out.split()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", USERS)
async def test_no_file_outside_the_allow_list_is_there(mode: str, user: str | None, canaries: str) -> None:
    async with local(mode) as backend, place(backend) as where:
        needs_user(where, user)
        ran = await where.run(["python3", "-c", WALK, "/", canaries], user=user)
        assert (ran.code, ran.out) == (0, "")
        # the same program does find one when there is one
        await where.put(f"/tmp/{canaries}", b"")
        ran = await where.run(["python3", "-c", WALK, "/", canaries], user=user)
        assert ran.out.strip() == f"/tmp/{canaries}"


@pytest.mark.parametrize("mode", MODES)
async def test_every_inode_of_the_machine_outside_the_allow_list_is_absent(mode: str) -> None:
    """By name and size: whatever lies in the machine's own directories and is not chosen for the base."""
    outside = [
        str(path)
        for top in (
            "/home",
            "/root",
            "/srv",
            "/mnt",
            "/media",
            "/boot",
            "/var/log",
            "/var/spool",
            "/work",
            "/tmp",
        )
        if os.path.isdir(top) and os.access(top, os.R_OK)
        for path in list(Path(top).glob("*"))[:200] + list(Path(top).glob("*/*"))[:200]
    ]
    secret = [
        p
        for p in ("/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/sudoers", "/etc/machine-id")
        if os.path.exists(p)
    ]
    assert outside, "nothing to look for on this machine: the test shows nothing"
    async with local(mode) as backend, place(backend) as where:
        script = (
            "import os, sys\n"
            "for p in sys.stdin.read().split('\\0'):\n"
            "    if p and os.path.lexists(p): print(p, os.path.realpath(p))"
        )
        ran = await where.run(
            ["python3", "-c", script], stdin="\0".join(outside).encode("utf-8", "surrogateescape")
        )
        assert ran.code == 0, ran
        own = {f"/home/{n}" for n in ("user", "agent")}
        seen = [
            line
            for line in ran.out.splitlines()
            if not any(
                line.split()[0].startswith(prefix) for prefix in (*own, "/root/.", "/tmp/.", "/var/log")
            )
        ]
        assert seen == []
        for path in secret:
            inside = await where.sh(f"cat {path} 2>/dev/null")
            if AS_ROOT and os.path.isfile(path):
                assert inside.out != Path(path).read_text(), f"{path} of the machine can be read"
        if AS_ROOT:
            assert "$" not in (await where.sh("cat /etc/shadow")).out, "a password hash"


@pytest.mark.parametrize("mode", MODES)
async def test_ways_out_of_the_root_lead_back_into_it(mode: str) -> None:
    async with local(mode) as backend, place(backend) as where:
        await looks.ways_out_lead_back(where)


@pytest.mark.parametrize("mode", MODES)
async def test_nothing_written_inside_appears_outside(mode: str, tmp_path: Path) -> None:
    word = "written-" + secrets.token_hex(8)
    async with local(mode) as backend, place(backend) as where:
        before = {
            p: os.stat(p).st_mtime_ns for p in ("/usr", "/usr/bin", "/etc", "/tmp", "/var/tmp", "/dev/shm")
        }
        tops = "/ /usr /usr/bin /etc /tmp /var/tmp /root /home /opt /srv /dev /dev/shm /proc /sys /run"
        await where.sh(f"for d in {tops}; do echo x > $d/{word}; done 2>/dev/null")
        # an ordinary user's sandbox shows the machine's /usr as nobody's: its root may not write there
        reach = ("/usr/bin", "/etc", "/tmp", "/dev/shm") if AS_ROOT else ("/etc", "/tmp", "/dev/shm")
        planted = await where.sh("ls " + " ".join(f"{directory}/{word}" for directory in reach))
        assert planted.code == 0, "the attempt must write something, or it shows nothing"
        await where.sh("chmod 0777 /usr/bin; rm -rf /usr/bin/env /etc/passwd; chmod 666 /dev/null")
        for directory in ("/", "/usr", "/usr/bin", "/etc", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/run"):
            assert not os.path.lexists(f"{directory}/{word}"), f"{directory}/{word} is on this machine"
        for path in ("/usr", "/usr/bin", "/etc"):
            assert os.stat(path).st_mtime_ns == before[path]
        assert os.path.exists("/usr/bin/env")
        assert stat.S_IMODE(os.stat("/dev/null").st_mode) == 0o666


@pytest.mark.parametrize("mode", MODES)
async def test_exposed_paths_are_read_only(mode: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("as it was")
    for path in (shared, shared / "file", *tmp_path.parents):
        if (
            path.is_relative_to("/tmp")
            and path != Path("/tmp")
            and path.owner() == Path("/proc/self").owner()
        ):
            path.chmod(path.stat().st_mode | 0o055)
    (shared / "file").chmod(0o666)
    shared.chmod(0o777)
    async with local(mode) as backend, place(backend, Spec(expose=(str(shared),))) as where:
        assert (await where.sh(f"cat {shared}/file")).out == "as it was"
        for attempt in (
            f"echo x > {shared}/file",
            f"echo x > {shared}/new",
            f"rm {shared}/file",
            f"chmod 600 {shared}/file",
            f"touch {shared}/file",
            f"mv {shared}/file {shared}/other",
            f"ln {shared}/file /tmp/l",
            f"rmdir {shared}",
        ):
            ran = await where.sh(attempt)
            assert ran.code != 0, f"{attempt} worked"
    assert (shared / "file").read_text() == "as it was"
    assert sorted(p.name for p in shared.iterdir()) == ["file"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", USERS)
async def test_environment_and_descriptors_of_this_python_stay_here(
    mode: str, user: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "secret-" + secrets.token_hex(8)
    monkeypatch.setenv("RLS_TEST_SECRET", word)
    held = os.open(tmp_path / word, os.O_RDWR | os.O_CREAT, 0o600)
    pipe = os.pipe()
    left, right = socket.socketpair()
    for fd in (held, *pipe, left.fileno(), right.fileno()):
        os.set_inheritable(fd, True)
    try:
        # control: a plain child has both
        plain = subprocess.run(
            ["sh", "-c", "echo $RLS_TEST_SECRET; ls -l /proc/self/fd"],
            close_fds=False,
            capture_output=True,
            text=True,
        ).stdout
        assert plain.splitlines()[0] == word
        assert f"/{word}" in plain.split("\n", 1)[1]
        async with local(mode) as backend, place(backend) as where:
            needs_user(where, user)
            assert word not in (await where.sh("env; cat /proc/[0-9]*/environ", user=user)).out
            ran = await where.run(
                ["python3", "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"],
                user=user,
            )
            assert ran.out.strip() == "[0, 1, 2]"
            links = await where.sh("ls -l /proc/[0-9]*/fd 2>/dev/null; ls -l /proc/self/fd", user=user)
            assert word not in links.out
    finally:
        for fd in (held, *pipe):
            os.close(fd)
        left.close()
        right.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", USERS)
async def test_no_file_of_the_keeper_in_proc_can_be_written_nor_its_memory_read(
    mode: str, user: str | None, tmp_path: Path
) -> None:
    program = compiled("trysyscall", tmp_path)
    if program is None:
        pytest.skip("no C compiler that can link statically")
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        # control: the same user may write these of a process of their own
        assert on_host([str(program), "write", f"/proc/{sleeper.pid}/oom_score_adj", "500"]).said == "ok"
        assert on_host([str(program), "open", f"/proc/{sleeper.pid}/mem", "2"]).said == "ok"
    finally:
        sleeper.kill()
        sleeper.wait()
    async with local(mode) as backend, place(backend) as where:
        needs_user(where, user)
        await where.put("/try", program.read_bytes())
        await looks.first_process_is_shut(where, user, "/try")


@pytest.mark.parametrize("mode", MODES)
async def test_the_keepers_socket_is_nowhere_to_be_found(mode: str) -> None:
    async with local(mode) as backend, place(backend) as where:
        await looks.keepers_socket_is_nowhere(where)


@pytest.mark.parametrize("mode", MODES)
async def test_frames_written_to_every_descriptor_reach_no_keeper(mode: str) -> None:
    async with local(mode) as backend, place(backend) as where:
        await looks.frames_reach_no_keeper(where)


@pytest.mark.parametrize("mode", MODES)
async def test_two_sandboxes_share_nothing(mode: str) -> None:
    async with local(mode) as backend, place(backend) as one, place(backend) as two:
        await looks.two_share_nothing(one, two)
