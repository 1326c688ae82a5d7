"""Kinds of dirt an episode can leave, how to plant each with ordinary commands, and what must be found.

Each script runs with ``sh -eu`` in the task's repository. Exit status 77 with a line on stderr means that the
sandbox (or the kernel) refuses to have this kind of dirt; that is told, and counts as refused, not as planted.
Helpers of the prologue: ``py`` runs Python, ``seen`` waits until a command line fits (so that no shell is caught
before its exec), ``bg`` starts a program in the background and waits until it has printed a line, ``refused`` ends with 77.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT, USER = "root", "user"

SETUP = r"""
set -eu
mkdir -p /work/repo /home/agent /work/outside
cd /work/repo
printf '[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n' > /etc/gitconfig
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@x GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@x
printf 'build/\n*.log\n' > .gitignore
mkdir -p src build
echo 'print("one")' > src/one.py; echo 'print("two")' > src/two.py; printf '#!/bin/sh\n' > run.sh
echo cached > build/cache.bin; echo noise > old.log
if command -v git >/dev/null; then
    git init -q .; git add -A; git commit -qm first
    echo 'print("two, better")' > src/two.py; git commit -qam second
    git branch side HEAD~1
    git init -q --bare /work/outside/bare.git
fi
ln -s src/one.py link
chown -R 1000:1000 /work /home/agent
"""

SETUP_OF_USER = "\n".join(line for line in SETUP.splitlines() if "/etc/gitconfig" not in line)
"""The same where commands may not write to /etc: the image has to have that file, and directories that are the user's."""

PROLOGUE = r"""
set -eu
cd /work/repo
export GIT_AUTHOR_NAME=b GIT_AUTHOR_EMAIL=b@x GIT_COMMITTER_NAME=b GIT_COMMITTER_EMAIL=b@x
refused() { echo "$*" >&2; exit 77; }
py() { python3 -c "$@"; }
seen() { until cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' | grep -q -e "$1"; do :; done; }
bg() { rm -f /tmp/.up; mkfifo /tmp/.up; "$@" >/tmp/.up 2>/dev/null & read -r _ </tmp/.up || true; rm -f /tmp/.up; }
"""


@dataclass(frozen=True)
class Dirt:
    """One kind: its name, the script, who can plant it, and the (kind, part of what) to be found."""

    name: str
    script: str
    kind: str
    what: str
    who: tuple[str, ...] = (ROOT, USER)
    needs: str = ""
    """A program without which it cannot be planted."""


def _git(name: str, script: str, what: str, kind: str = "git") -> Dirt:
    return Dirt("git " + name, script, kind, what, needs="git")


def _root(name: str, script: str, kind: str, what: str) -> Dirt:
    return Dirt(name, script, kind, what, (ROOT,))


FILES = [
    Dirt("dotfile in /tmp", "echo x > /tmp/.hidden", "tmp", "/tmp/.hidden"),
    Dirt("tree in /tmp", "mkdir -p /tmp/a/b/.c; echo x > /tmp/a/b/.c/d", "tmp", "/tmp/a/b/.c/d"),
    Dirt("dotfile in /dev/shm", "echo x > /dev/shm/.x", "shared memory", "/dev/shm/.x"),
    Dirt("file in /var/tmp", "echo x > /var/tmp/.x", "tmp", "/var/tmp/.x"),
    _root("pid file in /run", "mkdir -p /run/lock; echo 1 > /run/evil.pid", "tmp", "/run/evil.pid"),
    Dirt("untracked file", "echo x > new.py", "workdir", "/work/repo/new.py"),
    Dirt("ignored file", "echo x > build/poisoned.bin", "workdir", "/work/repo/build/poisoned.bin"),
    Dirt("ignored file edited", "echo x >> build/cache.bin", "workdir", "/work/repo/build/cache.bin"),
    Dirt("tracked file edited", "echo x >> src/one.py", "workdir", "/work/repo/src/one.py"),
    Dirt("tracked file deleted", "rm src/one.py", "workdir", "/work/repo/src/one.py"),
    Dirt(
        "file re-created with another content of the same size, and its time",
        "cp -p src/one.py /tmp/keep; rm src/one.py; tr o x < /tmp/keep > src/one.py;"
        " touch -r /tmp/keep src/one.py; rm /tmp/keep",
        "workdir",
        "/work/repo/src/one.py",
    ),
    # All that differs is its inode: the directory's time tells.
    Dirt(
        "file re-created with its content and time",
        "cp -p src/one.py /tmp/keep; rm src/one.py; cp -p /tmp/keep src/one.py; rm /tmp/keep",
        "workdir",
        "/work/repo/src",
    ),
    Dirt("mode", "chmod 0777 run.sh", "workdir", "/work/repo/run.sh"),
    Dirt(
        "mode with the time put back",
        "touch -r run.sh /tmp/t; chmod +x run.sh; touch -r /tmp/t run.sh; rm /tmp/t",
        "workdir",
        "/work/repo/run.sh",
    ),
    Dirt("time", "touch -t 200001010000 src/one.py", "workdir", "/work/repo/src/one.py"),
    Dirt("directory time", "touch -t 200001010000 src", "workdir", "/work/repo/src"),
    Dirt("owner", "chown 1:1 run.sh", "workdir", "/work/repo/run.sh", (ROOT,)),
    Dirt(
        "extended attribute",
        """py 'import os
try: os.setxattr("src/one.py", "user.evil", b"1")
except OSError as e: raise SystemExit(f"{e}")' || refused "no user attributes here" """,
        "workdir",
        "/work/repo/src/one.py",
    ),
    Dirt(
        "access list",
        """py 'import os
acl = b"\\2\\0\\0\\0" + b"".join(t.to_bytes(2, "little") + p.to_bytes(2, "little") + i.to_bytes(4, "little") for t, p, i in
  ((1, 6, 2**32-1), (2, 7, 1), (4, 4, 2**32-1), (16, 7, 2**32-1), (32, 4, 2**32-1)))
os.setxattr("src/one.py", "system.posix_acl_access", acl)' || refused "no access lists here" """,
        "workdir",
        "/work/repo/src/one.py",
    ),
    Dirt(
        "file capability",
        """cp /bin/sh /tmp/capable; py 'import os, struct
os.setxattr("/tmp/capable", "security.capability", struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0))' || refused "no file capabilities here" """,
        "tmp",
        "/tmp/capable",
        (ROOT,),
    ),
    Dirt("hard link", "ln src/one.py src/same.py", "workdir", "/work/repo/src/same.py"),
    Dirt("symbolic link turned", "ln -sfn /etc/passwd link", "workdir", "/work/repo/link"),
    Dirt(
        "symbolic link to a directory of the host",
        "ln -s / build/everything",
        "workdir",
        "/work/repo/build/everything",
    ),
    Dirt("directory renamed", "mv src source", "workdir", "/work/repo/source"),
    Dirt("directory replaced by a file", "rm -rf build; echo x > build", "workdir", "/work/repo/build"),
    Dirt("directory emptied and made again", "rm -rf build; mkdir build", "workdir", "/work/repo/build"),
    Dirt("sparse file of 1 GiB", "truncate -s 1073741824 build/huge", "workdir", "/work/repo/build/huge"),
    Dirt(
        "name that is no UTF-8",
        "touch \"$(printf 'odd\\377\\nname')\"",
        "workdir",
        "/work/repo/odd\\xff\\x0aname",
    ),
    Dirt("name of 255 bytes", "touch $(printf '%0255d' 7)", "workdir", "/work/repo/000000"),
    Dirt(
        "deep path",
        "d=build; i=0; while [ $i -lt 60 ]; do d=$d/deep; i=$((i+1)); done; mkdir -p $d; echo x > $d/f",
        "workdir",
        "/work/repo/build/deep/deep/deep",
    ),
    Dirt("fifo", "mkfifo build/pipe", "workdir", "/work/repo/build/pipe"),
    Dirt("setuid copy of a shell", "cp /bin/sh /tmp/sh; chmod 4755 /tmp/sh", "tmp", "/tmp/sh"),
    Dirt("core file", "echo core > core.4711", "workdir", "/work/repo/core.4711"),
    _root("file in /opt", "mkdir -p /opt; echo x > /opt/x", "file", "/opt/x"),
    _root("file in /usr/share", "mkdir -p /usr/share; echo x > /usr/share/x", "file", "/usr/share/x"),
    _root("file at the top", "echo x > /x", "file", "/x"),
    _root("program deleted", "rm -f /usr/bin/env", "path", "/usr/bin/env"),
    _root(
        "program replaced",
        "rm -f /usr/bin/id; echo '#!/bin/sh' > /usr/bin/id; chmod 755 /usr/bin/id",
        "path",
        "/usr/bin/id",
    ),
    _root("mode of the root directory", "chmod 0777 /", "file", "/"),
    _root("time zone", "ln -sfn /usr/share/zoneinfo/Asia/Tokyo /etc/localtime", "file", "/etc/localtime"),
    _root(
        "package sources",
        "mkdir -p /etc/apt/sources.list.d; echo deb x > /etc/apt/sources.list.d/evil.list",
        "file",
        "/etc/apt/sources.list.d/evil.list",
    ),
]

STARTUP = [
    Dirt("shell function in .bashrc", "echo 'git() { echo shim; }' >> ~/.bashrc", "shell", "/.bashrc"),
    Dirt(".profile", "echo 'export EVIL=1' >> ~/.profile", "shell", "/.profile"),
    Dirt(".bash_profile", "echo 'export EVIL=1' >> ~/.bash_profile", "shell", "/.bash_profile"),
    Dirt(".zshenv", "echo 'export EVIL=1' >> ~/.zshenv", "shell", "/.zshenv"),
    Dirt(".inputrc", "echo 'set editing-mode vi' >> ~/.inputrc", "shell", "/.inputrc"),
    Dirt("shell history", "echo 'cat /flag' >> ~/.bash_history", "shell", "/.bash_history"),
    Dirt(".vimrc", "echo 'autocmd BufRead * !x' >> ~/.vimrc", "shell", "/.vimrc"),
    _root("/etc/profile.d", "mkdir -p /etc/profile.d; echo 'alias ls=x' > /etc/profile.d/evil.sh", "shell", "/etc/profile.d/evil.sh"),
    _root("/etc/profile", "echo 'alias ls=x' >> /etc/profile", "shell", "/etc/profile"),
    _root("/etc/environment", "echo 'LD_PRELOAD=/x.so' >> /etc/environment", "shell", "/etc/environment"),
    _root("ld.so.preload", ": > /etc/ld.so.preload", "loader", "/etc/ld.so.preload"),
    _root("ld.so.conf.d", "mkdir -p /etc/ld.so.conf.d; echo /evil > /etc/ld.so.conf.d/evil.conf", "loader", "/etc/ld.so.conf.d/evil.conf"),
    _root("PATH shim for git", "mkdir -p /usr/local/bin; printf '#!/bin/sh\\n' > /usr/local/bin/git; chmod 755 /usr/local/bin/git", "path", "/usr/local/bin/git"),
    Dirt("PATH shims for ls and ps at home", "mkdir -p ~/.local/bin; for p in ls ps; do printf '#!/bin/sh\\n' > ~/.local/bin/$p; done; chmod 755 ~/.local/bin/*", "path", "/.local/bin/ls"),
    Dirt("~/bin", "mkdir -p ~/bin; echo x > ~/bin/python3", "path", "/bin/python3"),
    _root("crontab", "mkdir -p /var/spool/cron/crontabs; echo '* * * * * x' > /var/spool/cron/crontabs/agent", "schedule", "/var/spool/cron/crontabs/agent"),
    _root("/etc/cron.d", "mkdir -p /etc/cron.d; echo '* * * * * root x' > /etc/cron.d/evil", "schedule", "/etc/cron.d/evil"),
    _root("at job", "mkdir -p /var/spool/at; echo x > /var/spool/at/a0000101", "schedule", "/var/spool/at/a0000101"),
    Dirt("user service", "mkdir -p ~/.config/systemd/user; echo x > ~/.config/systemd/user/evil.service", "service", "evil.service"),
    Dirt("autostart", "mkdir -p ~/.config/autostart; echo x > ~/.config/autostart/evil.desktop", "service", "evil.desktop"),
    _root("new account", "echo 'evil:x:0:0::/:/bin/sh' >> /etc/passwd", "rights", "/etc/passwd"),
    _root("sudoers", "mkdir -p /etc/sudoers.d; echo 'ALL ALL=NOPASSWD: ALL' > /etc/sudoers.d/evil", "rights", "/etc/sudoers.d/evil"),
    _root("/etc/hosts", "echo '10.0.0.1 pypi.org' 2>/dev/null >> /etc/hosts || refused '/etc/hosts is read-only'", "network", "/etc/hosts"),
    _root("/etc/resolv.conf", "rm -f /etc/resolv.conf 2>/dev/null || refused '/etc/resolv.conf cannot be removed'; echo 'nameserver 10.0.0.1' > /etc/resolv.conf", "network", "/etc/resolv.conf"),
    Dirt("proxy for curl", "echo 'proxy=10.0.0.1' > ~/.curlrc", "network", "/.curlrc"),
]  # fmt: skip

PYTHON = [
    Dirt("sitecustomize at home", "d=~/.local/lib/python3.11/site-packages; mkdir -p $d; echo x=1 > $d/sitecustomize.py", "python", "sitecustomize.py"),
    Dirt("usercustomize at home", "d=~/.local/lib/python3.11/site-packages; mkdir -p $d; echo x=1 > $d/usercustomize.py", "python", "usercustomize.py"),
    Dirt(".pth at home", "d=~/.local/lib/python3.11/site-packages; mkdir -p $d; echo 'import os' > $d/evil.pth", "python", "evil.pth"),
    _root(".pth in dist-packages", "d=/usr/lib/python3/dist-packages; mkdir -p $d; echo 'import os' > $d/evil.pth", "python", "/usr/lib/python3/dist-packages/evil.pth"),
    _root("module in dist-packages", "d=/usr/local/lib/python3.11/dist-packages; mkdir -p $d; echo x=1 > $d/pytest.py", "python", "/dist-packages/pytest.py"),
    _root("standard library edited", "d=/usr/lib/python3.11/json; mkdir -p $d; echo x=1 >> $d/__init__.py", "python", "/usr/lib/python3.11/json/__init__.py"),
    Dirt("byte code in the work tree", "mkdir -p src/__pycache__; echo x > src/__pycache__/one.cpython-311.pyc", "python", "/work/repo/src/__pycache__/one.cpython-311.pyc"),
    Dirt("pip.conf", "mkdir -p ~/.config/pip; echo '[global]' > ~/.config/pip/pip.conf", "python", "/.config/pip/pip.conf"),
    Dirt("conftest.py", "echo 'import sys' > conftest.py", "workdir", "/work/repo/conftest.py"),
]  # fmt: skip

GIT = [
    _git("skip-worktree edit", "git update-index --skip-worktree src/one.py; echo evil >> src/one.py", "/work/repo/.git/index: src/one.py"),
    _git("assume-unchanged edit", "git update-index --assume-unchanged src/two.py; echo evil >> src/two.py", "/work/repo/.git/index: src/two.py"),
    _git("hook", "mkdir -p .git/hooks; printf '#!/bin/sh\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit", "/.git/hooks/pre-commit"),
    _git("hooks path", "git config core.hooksPath /tmp/hooks", "/.git/config"),
    _git("config include", "git config include.path /tmp/evil.conf", "/.git/config"),
    _git("alias", "git config alias.status '!true'", "/.git/config"),
    _git("filter", "git config filter.x.smudge 'sed s/a/b/'; mkdir -p .git/info; echo '*.py filter=x' > .git/info/attributes", "/.git/info/attributes"),
    _git("global config", "git config --global user.name evil", "/.gitconfig"),
    _git("branch", "git branch evil", "/.git/refs/heads/evil"),
    _git("tag", "git tag evil", "/.git/refs/tags/evil"),
    _git("reflog", "git reset -q --hard HEAD~1; git reset -q --hard HEAD@{1}", "/.git/logs/HEAD"),
    _git("commit", "echo x >> src/one.py; git commit -qam evil", "/.git/objects/"),
    _git("amend", "git commit -q --amend -m evil", "/.git/refs/heads/main"),
    _git("stash", "echo x >> src/one.py; git stash -q", "/.git/refs/stash"),
    _git("notes", "git notes add -m evil HEAD", "/.git/refs/notes/commits"),
    _git("replace ref", "git replace HEAD HEAD~1", "/.git/refs/replace/"),
    _git("worktree", "git worktree add -q /tmp/wt side", "/.git/worktrees/wt"),
    _git("alternates", "mkdir -p .git/objects/info; echo /work/outside/bare.git/objects > .git/objects/info/alternates", "/.git/objects/info/alternates"),
    _git("grafts", "mkdir -p .git/info; git rev-parse HEAD > .git/info/grafts", "/.git/info/grafts"),
    _git("exclude", "mkdir -p .git/info; echo '*.py' >> .git/info/exclude", "/.git/info/exclude"),
    _git("detached HEAD", "git checkout -q --detach", "/.git/HEAD"),
    _git("packed refs", "git pack-refs --all", "/.git/packed-refs"),
    _git("unfinished merge", "git checkout -q -b m side; echo other > src/two.py; git commit -qam m; git merge -q main || true; test -f .git/MERGE_HEAD", "/.git/MERGE_HEAD"),
    _git("index lock", ": > .git/index.lock", "/.git/index.lock"),
    _git("bare repository", "git push -q /work/outside/bare.git main", "/work/outside/bare.git/refs/heads/main"),
    _git("nested repository", "git init -q build/sub", "/work/repo/build/sub/.git/HEAD"),
]  # fmt: skip

PROCESSES = [
    Dirt("background process", "sleep 4711 >/dev/null 2>&1 & seen '[s]leep 4711'", "process", "sleep 4711"),
    Dirt("setsid daemon", "setsid sleep 4712 >/dev/null 2>&1 & seen '[s]leep 4712'", "process", "sleep 4712"),
    Dirt("double fork", "(setsid sh -c '\"$0\" 4713 & exit' sleep >/dev/null 2>&1 &); seen '[s]leep 4713'", "process", "sleep 4713"),
    Dirt("process that ignores TERM", "bg sh -c 'trap \"\" TERM HUP INT; echo up; exec sleep 4714'", "process", "sleep 4714"),
    Dirt("stopped process", "setsid sleep 4715 >/dev/null 2>&1 & until tr '\\0' ' ' </proc/$!/cmdline | grep -q '^sleep 4715'; do :; done; kill -STOP $!", "process", "sleep 4715"),
    Dirt("zombie", "bg py 'import os, time\nif os.fork() == 0: os._exit(0)\nprint(\"up\", flush=True); time.sleep(4716)'", "process", "time.sleep(4716)"),
    Dirt("hundred processes", "i=0; while [ $i -lt 100 ]; do sleep 4717 >/dev/null 2>&1 & i=$((i+1)); done", "process", "sleep 4717"),
    Dirt("deleted program", "p=/usr/bin/sleep; test -x $p || p=/bin/sleep; cp $p /tmp/s; if /tmp/s 0 2>/dev/null; then /tmp/s 4718 >/dev/null 2>&1 & else mv /tmp/s /tmp/sleep; /tmp/sleep 4718 >/dev/null 2>&1 & fi; seen '[s]l*e*e*p* 4718'; rm -f /tmp/s /tmp/sleep", "process", "4718"),
    Dirt("writer that goes on during the reset", "bg sh -c 'echo up; while :; do echo x >> /tmp/late; echo x >> /work/repo/late; echo x > /dev/shm/late; done'", "process", "while :"),
    Dirt("token on a command line", "sh -c 'sleep 4719; : tok-on-cmdline-123' >/dev/null 2>&1 & seen '[t]ok-on-cmdline'", "process", "[redacted]"),
    Dirt("TCP listener", "bg py 'import socket, time\ns = socket.socket(); s.bind((\"0.0.0.0\", 8471)); s.listen(); print(\"up\", flush=True); time.sleep(4720)'", "socket", "tcp 0.0.0.0:8471"),
    Dirt("TCP listener on IPv6", "bg py 'import socket, time\ntry: s = socket.socket(socket.AF_INET6); s.bind((\"::1\", 8472)); s.listen()\nexcept OSError: s = None\nprint(\"up\", flush=True); time.sleep(4721 if s else 0)' ; grep -q :2118 /proc/net/tcp6 || refused 'no IPv6 loopback here'", "socket", ":8472"),
    Dirt("UDP socket", "bg py 'import socket, time\ns = socket.socket(type=socket.SOCK_DGRAM); s.bind((\"127.0.0.1\", 8473)); print(\"up\", flush=True); time.sleep(4722)'", "socket", "udp 127.0.0.1:8473"),
    Dirt("abstract socket", "bg py 'import socket, time\ns = socket.socket(socket.AF_UNIX); s.bind(\"\\0evil-abstract\"); s.listen(); print(\"up\", flush=True); time.sleep(4723)'", "socket", "@evil-abstract"),
    Dirt("socket with a path", "bg py 'import socket, time\ns = socket.socket(socket.AF_UNIX); s.bind(\"/tmp/evil.sock\"); s.listen(); print(\"up\", flush=True); time.sleep(4724)'", "tmp", "/tmp/evil.sock"),
    Dirt("socket file without a listener", "py 'import socket; socket.socket(socket.AF_UNIX).bind(\"/tmp/dead.sock\")'", "tmp", "/tmp/dead.sock"),
    Dirt("connection to itself", "bg py 'import socket, time\ns = socket.socket(); s.bind((\"127.0.0.1\", 8475)); s.listen(); c = socket.create_connection((\"127.0.0.1\", 8475)); a = s.accept(); print(\"up\", flush=True); time.sleep(4725)'", "socket", "127.0.0.1:8475"),
    Dirt("terminal held open", "bg py 'import os, time\nm, s = os.openpty(); print(\"up\", flush=True); time.sleep(4726)'", "process", "time.sleep(4726)"),
]  # fmt: skip

_IPC = "py 'import ctypes; c = ctypes.CDLL(None, use_errno=True); r = {call}; raise SystemExit(r < 0)'"
KERNEL = [
    Dirt("SysV shared memory", _IPC.format(call="c.shmget(0x4711, 4096, 0o1600)"), "ipc", "shm"),
    Dirt("SysV semaphores", _IPC.format(call="c.semget(0x4711, 3, 0o1600)"), "ipc", "sem"),
    Dirt("SysV message queue", _IPC.format(call="c.msgget(0x4711, 0o1600)"), "ipc", "msg"),
    Dirt("POSIX shared memory", "py 'from multiprocessing import shared_memory, resource_tracker as t\nt.register = lambda *a: None\nshared_memory.SharedMemory(\"evil\", True, 4096).close()'", "shared memory", "/dev/shm/evil"),
    Dirt("POSIX message queue", _IPC.format(call='c.mq_open(b"/evil", 0o102, 0o600, None)'), "message queue", "/dev/mqueue/evil"),
    _root("limit of the episode's first process", "py 'import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64))' 2>/dev/null || refused 'limits of the first process cannot be changed'", "limit", "open files"),
    _root("niceness of the episode's first process", "py 'import os; os.setpriority(os.PRIO_PROCESS, 1, 7)' 2>/dev/null || refused 'the first process cannot be reniced'", "process state", "nice"),
    _root("CPU affinity of the episode's first process", "py 'import os; os.sched_setaffinity(1, {0})' 2>/dev/null || refused 'the affinity of the first process cannot be changed'; test \"$(nproc)\" -ge 1", "process state", "pus_allowed"),
    _root("scheduling policy of the episode's first process", "py 'import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))' 2>/dev/null || refused 'the scheduling policy of the first process cannot be changed'", "process state", "scheduling"),
    _root("io priority of the episode's first process", "py 'import ctypes, os; n = dict(x86_64=251, aarch64=30)[os.uname().machine]; raise SystemExit(ctypes.CDLL(None).syscall(n, 1, 1, 3 << 13) < 0)' || refused 'the io priority of the first process cannot be changed'", "process state", "input and output"),
    _root("oom score of the episode's first process", "echo 900 2>/dev/null > /proc/1/oom_score_adj || refused 'the oom score of the first process cannot be written'", "process state", "oom_score_adj"),
    _root("mount", "mkdir -p /tmp/m; mount -t tmpfs x /tmp/m 2>/tmp/why || { rm -rf /tmp/m /tmp/why; refused 'mount is refused'; }", "mount", "/tmp/m"),
    _root("bind mount", "mount --bind /etc /opt 2>/dev/null || refused 'bind mounts are refused'", "mount", "/opt"),
    Dirt("keyring", "py 'import ctypes; c = ctypes.CDLL(None); raise SystemExit(c.syscall(248, b\"user\", b\"evil\", b\"x\", 1, -3) < 0)' || refused 'add_key is refused'", "keyring", "evil"),
    _root("host name", "hostname evil 2>/dev/null || refused 'sethostname is refused'", "hostname", "hostname"),
    _root("clock", "date -s '2001-01-01' >/dev/null 2>&1 || :; test $(date +%Y) -gt 2001 && refused 'setting the clock is refused'", "clock", "clock"),
    _root("kernel setting", "echo 1 2>/dev/null > /proc/sys/vm/drop_caches || refused '/proc/sys is read-only'", "kernel", "vm"),
    _root("device node", "mknod /tmp/mem c 1 1 2>/dev/null || refused 'device nodes are refused'", "tmp", "/tmp/mem"),
    _root("file in /dev", "echo x 2>/dev/null > /dev/evil || refused '/dev is read-only'", "file", "/dev/evil"),
    _root("immutable file", "echo x > /tmp/i; chattr +i /tmp/i 2>/dev/null || { rm /tmp/i; refused 'the immutable flag is refused'; }", "tmp", "/tmp/i"),
]  # fmt: skip

CREDENTIALS = [
    Dirt("token in a file", "echo tok-in-a-file-123 > build/notes.txt", "credential", "/work/repo/build/notes.txt"),
    Dirt("token in a file name", "touch /tmp/tok-in-a-file-123", "credential", "/tmp/[redacted]"),
    Dirt(".netrc", "echo 'machine x password y' > ~/.netrc", "credential", "/.netrc"),
    Dirt("cloud credentials", "mkdir -p ~/.aws; echo '[default]' > ~/.aws/credentials", "credential", "/.aws/credentials"),
    Dirt("ssh keys", "mkdir -p ~/.ssh; echo 'ssh-ed25519 AAAA' > ~/.ssh/authorized_keys", "credential", "/.ssh/authorized_keys"),
    Dirt("git credentials", "echo 'https://u:p@x' > ~/.git-credentials", "credential", "/.git-credentials"),
    Dirt("registry login", "mkdir -p ~/.docker; echo '{}' > ~/.docker/config.json", "credential", "/.docker/config.json"),
    Dirt("gpg home", "mkdir -p ~/.gnupg; echo x > ~/.gnupg/private-keys-v1.d", "credential", "/.gnupg/"),
    Dirt("ssh agent", "ssh-agent -a /tmp/ssh-agent.sock >/dev/null 2>&1", "credential", "ssh-agent", needs="ssh-agent"),
    Dirt("gpg agent", "mkdir -p ~/.gnupg; chmod 700 ~/.gnupg; gpg-agent --daemon >/dev/null 2>&1", "credential", "gpg-agent", needs="gpg-agent"),
    Dirt("socket that looks like an agent's", "mkdir -p /tmp/ssh-AbCdEf; bg py 'import socket, time\ns = socket.socket(socket.AF_UNIX); s.bind(\"/tmp/ssh-AbCdEf/agent.7\"); s.listen(); print(\"up\", flush=True); time.sleep(4730)'", "credential", "/tmp/ssh-AbCdEf/agent.7"),
]  # fmt: skip

SECRETS = ("tok-in-a-file-123", "tok-on-cmdline-123")

EVERY = FILES + STARTUP + PYTHON + GIT + PROCESSES + KERNEL + CREDENTIALS
