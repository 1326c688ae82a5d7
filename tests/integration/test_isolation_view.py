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
        await where.sh("echo here > /inside-mark")
        ways = [
            "/../../../inside-mark",
            "/proc/self/root/inside-mark",
            "/proc/self/cwd/inside-mark",
            "/proc/$$/root/../../inside-mark",
            "/proc/thread-self/root/inside-mark",
        ]
        for way in ways:
            assert (await where.sh(f"cat {way}")).out == "here\n", way
        own = (await where.sh("ls /")).out
        for way in (
            "/proc/1/root",
            "/proc/1/cwd",
            "/proc/1/task/1/root",
            "/proc/1/fd/*",
            "/proc/1/map_files/*",
        ):
            ran = await where.sh(f"for p in {way}; do ls $p/ || cat $p; done 2>/dev/null")
            assert ran.out in ("", own), f"{way}: {ran.out}"
        ran = await where.sh("cd /; for i in 1 2 3 4 5 6 7 8; do cd ..; done; ls")
        assert "inside-mark" in ran.out


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


PROC_FILES = (
    "attr/current", "autogroup", "clear_refs", "comm", "coredump_filter", "fail-nth", "gid_map", "loginuid",
    "make-it-fail", "mem", "oom_adj", "oom_score_adj", "projid_map", "sched", "setgroups", "timens_offsets",
    "timerslack_ns", "uid_map", "ns/mnt", "root", "cwd", "exe", "environ", "maps", "map_files", "fd",
    "fdinfo",
    "syscall", "stack", "personality", "io", "auxv",
)  # fmt: skip


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
        opened = []
        for name in PROC_FILES:
            for flags in (1, 2):
                said = (await where.run(["/try", "open", f"/proc/1/{name}", str(flags)], user=user)).said
                if said == "ok":
                    opened.append(name)
        assert opened == []
        for name in ("environ", "mem", "maps", "auxv", "syscall", "stack", "io"):
            assert (await where.sh(f"head -c 1 /proc/1/{name}", user=user)).out == "", name
        said = [
            (await where.run(["/try", *words.split()], user=user)).said
            for words in ("ptrace 1", "vm_read 1", "pidfd_getfd 1", "kill 1 9", "setns /proc/1/ns/net")
        ]
        assert "ok" not in said[:3] + said[4:], said
        assert (await where.sh("echo alive")).out == "alive\n"


@pytest.mark.parametrize("mode", MODES)
async def test_the_keepers_socket_is_nowhere_to_be_found(mode: str) -> None:
    script = (
        "import os, socket, stat\n"
        "for d, ds, fs in os.walk('/'):\n"
        "    if d == '/': ds[:] = [x for x in ds if x not in ('proc', 'sys')]\n"
        "    for n in fs:\n"
        "        p = os.path.join(d, n)\n"
        "        try: st = os.lstat(p)\n"
        "        except OSError: continue\n"
        "        if stat.S_ISSOCK(st.st_mode): print('file', p)\n"
        "for line in open('/proc/net/unix').read().splitlines()[1:]:\n"
        "    w = line.split()\n"
        "    if len(w) > 7: print('named', w[7])\n"
        "for fd in range(3, 4096):\n"
        "    try: os.fstat(fd)\n"
        "    except OSError: continue\n"
        "    print('descriptor', fd)\n"
        "if os.path.exists('/.rlsandbox'): print('/.rlsandbox')\n"
    )
    async with local(mode) as backend, place(backend) as where:
        ran = await where.run(["python3", "-c", script])
        assert (ran.code, ran.out) == (0, ""), ran
        # the same program finds one when there is one
        ran = await where.run(
            [
                "python3",
                "-c",
                "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen()\n" + script,
            ]
        )
        assert "file /tmp/s" in ran.out
        assert "named /tmp/s" in ran.out


@pytest.mark.parametrize("mode", MODES)
async def test_frames_written_to_every_descriptor_reach_no_keeper(mode: str) -> None:
    """A HELLO, and a REQ that would end every process, written to whatever a command holds."""
    from rlsandbox.keeper.frames import encode_fields, encode_message
    from rlsandbox.keeper.wire import Op, Type

    frames = encode_message(Type.HELLO, 0, encode_fields({"version": 1, "token": ""}))
    frames += encode_message(Type.REQ, 7, encode_fields({"op": Op.KILL_ALL}))
    script = (
        f"import os\nfor fd in range(0, 256):\n    try: os.write(fd, {frames!r})\n    except OSError: pass\n"
    )
    async with local(mode) as backend, place(backend) as where:
        await where.sh("sleep 600 >/dev/null 2>&1 &")
        ran = await where.run(["python3", "-c", script])
        assert ran.code == 0
        assert ran.out.encode() == frames.decode("utf-8", "replace").encode()
        assert "sleep" in (await where.sh("cat /proc/[0-9]*/comm")).out


@pytest.mark.parametrize("mode", MODES)
async def test_two_sandboxes_share_nothing(mode: str) -> None:
    word = "other-" + secrets.token_hex(8)
    server = (
        "import ctypes, socket, time\n"
        f"a = socket.socket(socket.AF_UNIX); a.bind('\\0{word}'); a.listen()\n"
        "b = socket.socket(); b.bind(('0.0.0.0', 8499)); b.listen()\n"
        "assert ctypes.CDLL(None).shmget(0x4712, 4096, 0o1666) >= 0\n"
        f"open('/dev/shm/{word}', 'w').close(); open('/tmp/{word}', 'w').close()\n"
        f"print('up', flush=True); time.sleep(600)  # {word}\n"
    )
    client = (
        "import ctypes, os, socket\n"
        "def tried(name, f):\n"
        "    try: f()\n"
        "    except OSError: return\n"
        "    print(name)\n"
        f"tried('abstract', lambda: socket.socket(socket.AF_UNIX).connect('\\0{word}'))\n"
        "tried('tcp', lambda: socket.create_connection(('127.0.0.1', 8499), 2))\n"
        "if ctypes.CDLL(None).shmget(0x4712, 0, 0) >= 0: print('shm')\n"
        f"for p in ('/dev/shm/{word}', '/tmp/{word}'): tried(p, lambda: os.stat(p))\n"
        "for p in os.listdir('/proc'):\n"
        f"    if p.isdigit() and int(p) != os.getpid() and '{word}' in open(f'/proc/{{p}}/cmdline').read():\n"
        "        print('process', p)\n"
    )
    async with local(mode) as backend, place(backend) as one, place(backend) as two:
        started = await one.sh(
            'mkfifo /tmp/.up; python3 -c "$CODE" > /tmp/.up 2>/dev/null &'
            " read -r line < /tmp/.up; echo $line",
            env={"CODE": server},
        )
        assert started.out == "up\n", started
        inside = (await one.run(["python3", "-c", client])).out.split()
        assert {"abstract", "tcp", "shm", f"/tmp/{word}"} <= set(inside), (
            "control: in the same sandbox all of it works"
        )
        outside = await two.run(["python3", "-c", client])
        assert (outside.code, outside.out.split()) == (0, []), outside
