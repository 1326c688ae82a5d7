"""What an episode looks for and must not find: ways out of its root, the keeper, its descriptors, other sandboxes.

Each look has its positive control in itself: the same look, from where nothing hides what is looked for.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from rlsandbox.keeper.frames import encode_fields, encode_message
from rlsandbox.keeper.wire import Op, Type
from tests.support.isolation import NO_PEER, PROC_FILES, Attempt, judge, process_attempts
from tests.support.place import Place


async def ways_out_lead_back(where: Place, mark: str = "/inside-mark") -> None:
    """*mark*: where a command may put a file. A shell's number is read where that of its /proc is not its own."""
    assert (await where.sh(f"echo here > {mark}")).code == 0
    ways = [
        f"/../../..{mark}",
        f"/proc/self/root{mark}",
        f"/proc/self/cwd{mark}",
        f"/proc/$own/root/../..{mark}",
        f"/proc/thread-self/root{mark}",
    ]
    for way in ways:
        assert (await where.sh(f"read own _ < /proc/self/stat; cat {way}")).out == "here\n", way
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
    ran = await where.sh(f"cd /; for i in 1 2 3 4 5 6 7 8; do cd ..; done; cat .{mark}")
    assert ran.out == "here\n"


OPENED = """
import os, sys
for pid in sys.argv[1:]:
    for name in NAMES:
        for flags in (os.O_WRONLY, os.O_RDWR):
            try:
                os.close(os.open(f"/proc/{pid}/{name}", flags))
            except OSError:
                continue
            print(pid, name)
"""


async def opened_in_proc(where: Place, pids: list[int], user: str | None) -> set[tuple[int, str]]:
    """Which files of those processes let themselves be opened for writing."""
    ran = await where.run(["python3", "-c", f"NAMES = {PROC_FILES}{OPENED}", *map(str, pids)], user=user)
    assert ran.code == 0, ran
    return {(int(pid), name) for pid, name in map(str.split, ran.out.splitlines())}


async def nothing_is_read_in_proc(
    where: Place, pid: int, user: str | None, *, but: Collection[str] = ()
) -> None:
    for name in sorted({"environ", "mem", "maps", "auxv", "syscall", "stack", "io"} - {*but}):
        assert (await where.sh(f"head -c 1 /proc/{pid}/{name}", user=user)).out == "", name


async def first_process_is_shut(
    where: Place, user: str | None, program: str, *, read: Collection[str] = ()
) -> None:
    """*read*: what may be read of it, since this kernel lets everybody and it holds nothing."""
    assert await opened_in_proc(where, [1], user) == set()
    await nothing_is_read_in_proc(where, 1, user, but=read)
    if "environ" in read:
        assert (await where.sh("tr '\\0' '\\n' < /proc/1/environ | cut -d= -f1")).out == "PATH\n"
    said = [
        (await where.run([program, *words.split()], user=user)).said
        for words in ("ptrace 1", "vm_read 1", "pidfd_getfd 1", "kill 1 9", "setns /proc/1/ns/net")
    ]
    assert "ok" not in said[:3] + said[4:], said
    assert (await where.sh("echo alive")).out == "alive\n"


SOCKETS = (
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
    "if os.path.exists('/.rlsandbox'): print('/.rlsandbox', *os.listdir('/.rlsandbox'))\n"
)


KEEPERS = "/.rlsandbox-run/s/keeper"
DIALS = (
    "import socket, sys\n"
    "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
    "except OSError: print('refused')\n"
    "else: print('connected')\n"
)


async def keepers_socket_is_nowhere(where: Place, *, mounted: bool = False, listed: bool = False) -> None:
    """*mounted*: the directory over which the keeper is mounted belongs to the image's root. It is there, and empty.

    *listed*: this kernel lists the sockets of all, the keeper's too. It can be reached under no name.
    """
    ran = await where.run(["python3", "-c", SOCKETS])
    seen = [line for line in ran.out.splitlines() if not (listed and line == f"named {KEEPERS}")]
    assert (ran.code, seen) == (0, ["/.rlsandbox"] if mounted else []), ran
    if listed:
        assert f"named {KEEPERS}" in ran.out
        for name in (KEEPERS, f"/proc/1/root{KEEPERS}", f"/../..{KEEPERS}"):
            ran = await where.run(["python3", "-c", DIALS, name])
            assert ran.out == "refused\n", (name, ran)
    # the same program finds one when there is one
    ran = await where.run(
        [
            "python3",
            "-c",
            "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen()\n" + SOCKETS,
        ]
    )
    assert "file /tmp/s" in ran.out
    assert "named /tmp/s" in ran.out


async def frames_reach_no_keeper(where: Place) -> None:
    """A HELLO, and a REQ that would end every process, written to whatever a command holds."""
    frames = encode_message(Type.HELLO, 0, encode_fields({"version": 1, "token": ""}))
    frames += encode_message(Type.REQ, 7, encode_fields({"op": Op.KILL_ALL}))
    script = (
        f"import os\nfor fd in range(0, 256):\n    try: os.write(fd, {frames!r})\n    except OSError: pass\n"
    )
    await where.sh("sleep 600 >/dev/null 2>&1 &")
    ran = await where.run(["python3", "-c", script])
    assert ran.code == 0
    assert ran.out.encode() == frames.decode("utf-8", "replace").encode()
    assert "sleep" in (await where.sh("cat /proc/[0-9]*/comm")).out
    links = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    assert (await where.run(["python3", "-c", links])).out.strip() == "[0, 1, 2]"


async def two_share_nothing(one: Place, two: Place, *, abstract: bool = True) -> None:
    """*abstract*: whether there are abstract sockets at all."""
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
        f"    if p.isdigit() and p != os.readlink('/proc/self') and '{word}' in open(f'/proc/{{p}}/cmdline').read():\n"
        "        print('process', p)\n"
    )
    if not abstract:
        server = "\n".join(line for line in server.splitlines() if "a.bind" not in line)
    started = await one.sh(
        'mkfifo /tmp/.up; python3 -c "$CODE" > /tmp/.up 2>/dev/null & read -r line < /tmp/.up; echo $line',
        env={"CODE": server},
    )
    assert started.out == "up\n", started
    inside = (await one.run(["python3", "-c", client])).out.split()
    assert {*(["abstract"] if abstract else []), "tcp", "shm", f"/tmp/{word}"} <= set(inside), (
        "control: in the same sandbox all of it works"
    )
    outside = await two.run(["python3", "-c", client])
    assert (outside.code, outside.out.split()) == (0, []), outside


async def no_file_in_proc_is_opened(where: Place, user: str | None) -> None:
    """Where /proc is the container's, read-only: whoever's process it is."""
    pids = [int(pid) for pid in (await where.sh("ls /proc")).out.split() if pid.isdigit()]
    assert len(pids) >= 3, "the keeper's processes are seen"
    assert await opened_in_proc(where, pids, user) == set()


async def setuid_gains_nothing(where: Place, program: bytes) -> None:
    await where.put("/try", program, 0o4755)
    made = await where.sh("stat -c %a:%u /try")
    assert made.out.strip() == "4755:0", "the attempt needs a setuid file of the episode's root"
    assert (await where.run(["/try", "euid0"], user="1000")).said == "EPERM"
    assert (await where.run(["/try", "euid0"])).said == "ok"


# Where only its user and the kernel's rules stand between an episode and the keeper.


async def keepers(where: Place) -> list[int]:
    """The container's processes of root: the keeper's."""
    script = "for p in /proc/[0-9]*; do [ $(stat -c %u $p) = 0 ] && echo ${p#/proc/}; done 2>/dev/null"
    return [int(pid) for pid in (await where.sh(script)).out.split()]


async def keepers_processes_are_shut(where: Place, program: str) -> None:
    """They are in plain sight, and that is all."""
    pids = await keepers(where)
    assert 1 in pids and len(pids) >= 3, pids  # the first, the hub, the sandbox's keeper, the episode's init
    for pid in pids:
        assert await judge(where, process_attempts(pid), None, program) == []
        opened = [name for _, name in await opened_in_proc(where, [pid], None)]
        # Anybody may open these few; the kernel asks when they are written.
        assert (
            await judge(
                where, [Attempt(n, f"write /proc/{pid}/{n} 1", "plain") for n in opened], None, program
            )
            == []
        )
        await nothing_is_read_in_proc(where, pid, None)
        for way in ("root/.rlsandbox-run", "cwd/", "fd/", "map_files/", "task/1/root/"):
            assert (await where.sh(f"ls /proc/{pid}/{way}")).out == "", way
        said = (await where.run([program, "kill", str(pid), "9"])).said
        assert said == "EPERM"
    # control: the same of a process of its own
    own = (await where.sh("sleep 100 >/dev/null 2>&1 & echo $!")).out.strip()
    for attempt in ("ptrace", "kill", "vm_read"):
        more = "0" if attempt == "kill" else ""
        assert (await where.run([program, attempt, own, *more])).said in ("ok", "EFAULT"), attempt
    await where.sh("kill -9 -1")
    assert (await where.sh("echo alive")).out == "alive\n"


async def keepers_places_are_shut(where: Place, program: str) -> None:
    for path in ("/.rlsandbox-run", "/.rlsandbox-pristine"):
        for attempt in (
            f"ls {path}/s",
            f"ls {path}/1",
            f"find {path} -mindepth 2",
            f"echo x > {path}/x",
            f"mv {path} /tmp/x",
            f"chmod 777 {path}",
        ):
            assert (await where.sh(f"{attempt} 2>/dev/null")).out == "", attempt
        assert not (await where.sh(f"touch {path}/x || rm -rf {path}/* && ls -d {path}/1")).out
    attempts = [
        Attempt("file socket", "unix /.rlsandbox-run/s/keeper", "plain", refused=NO_PEER),
        Attempt("through /proc", "unix /proc/1/root/.rlsandbox-run/s/keeper", "plain", refused=NO_PEER),
    ]
    assert await judge(where, attempts, None, program) == []
    named = [
        line.split()[7]
        for line in (await where.sh("cat /proc/net/unix")).out.splitlines()[1:]
        if len(line.split()) > 7
    ]
    assert not [name for name in named if name.startswith("@")], "a keeper listens on no abstract name"
    for attempt in ("> /.rlsandbox/keeper", "rm -f /.rlsandbox/keeper", "mv /.rlsandbox /tmp/x"):
        assert (await where.sh(attempt)).code != 0, attempt


async def files_of_root_are_out_of_reach(where: Place) -> None:
    for attempt in (
        "echo x >> /etc/passwd", "rm /etc/passwd", "mv /etc /tmp/etc", "chmod 666 /etc/passwd", "touch /usr/bin/x",
        "ln /etc/passwd /tmp/p && echo x >> /tmp/p", "ln -s /etc/passwd /tmp/l && echo x >> /tmp/l", "cat /etc/shadow-of-nobody",
        "chown 0 /tmp", "mknod /tmp/null c 1 3", "mount -t tmpfs x /tmp",
    ):  # fmt: skip
        assert (await where.sh(attempt)).code != 0, attempt
