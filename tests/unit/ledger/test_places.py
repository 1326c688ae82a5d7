"""Names, files of further processes, kinds of filesystems, and who is alive."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlsandbox.errors import ConfigError
from rlsandbox.ledger import Ledger, lock, places
from rlsandbox.ledger.lock import RunLock
from rlsandbox.ledger.store import Store


@pytest.mark.parametrize("bad", ["", "a/b", "a+1", " a", "a b", "-a", ".a", "x" * 129, "é", 3, None])
def test_bad_run_names(bad: object) -> None:
    with pytest.raises(ConfigError, match="run must be a name"):
        places.check_run_name(bad)  # type: ignore[arg-type]


def test_made_up_run_names_are_good_and_differ() -> None:
    names = {places.check_run_name(places.new_run_name()) for _ in range(100)}
    assert len(names) == 100


def test_where_a_ledger_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert places.ledger_file("r") == tmp_path / "r.db"
    assert places.ledger_file("r", "runs/eval") == tmp_path / "runs/eval/r.db"
    assert places.ledger_file("r", "runs/eval.db") == tmp_path / "runs/eval.db"
    assert places.ledger_file("r", "~/x.sqlite").name == "x.sqlite"
    (tmp_path / "odd.db").mkdir()
    assert places.ledger_file("r", "odd.db") == tmp_path / "odd.db" / "r.db"


def test_siblings_of_runs_with_similar_names_are_kept_apart(tmp_path: Path) -> None:
    for name in (
        "run.db",
        "run+1.db",
        "run+10.db",
        "run+2.db",
        "run.1.db",
        "run-1.db",
        "run+x.db",
        "run+1.txt",
    ):
        (tmp_path / name).touch()
    assert [p.name for p in places.siblings(tmp_path / "run.db")] == [
        "run.db",
        "run+1.db",
        "run+2.db",
        "run+10.db",
    ]
    assert places.first_of(tmp_path / "run+10.db") == tmp_path / "run.db"
    assert places.first_of(tmp_path / "run.1.db") == tmp_path / "run.1.db"


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 0:41 / /home/me/scratch rw shared:1 - lustre mds:/x rw
32 22 0:42 / /mnt/my\\040disk rw - fuse.sshfs x rw
33 22 0:43 / /data rw - nfs server:/data rw
34 33 0:44 / /data rw - xfs /dev/vdb rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/", "ext4", False),
        ("/homes/x", "ext4", False),
        ("/home", "nfs4", True),
        ("/home/me", "nfs4", True),
        ("/home/me/scratch/a/b", "lustre", True),
        ("/mnt/my disk/x", "fuse.sshfs", True),
        ("/data/x", "xfs", False),
    ],
)
def test_which_filesystem(path: str, kind: str, shared: bool) -> None:
    assert places.filesystem(Path(path), MOUNTS) == kind
    assert places.is_shared(kind) is shared


def test_the_real_mount_table_answers(tmp_path: Path) -> None:
    told = subprocess.run(
        ["stat", "-f", "-c", "%T", "/proc"], capture_output=True, text=True, check=True
    ).stdout
    assert told.strip() == places.filesystem(Path("/proc"))
    assert places.filesystem(tmp_path)


def test_a_shared_disk_gets_a_rollback_journal_and_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(places, "filesystem", lambda path: "nfs4")
    with caplog.at_level("WARNING"):
        ledger = Ledger.open("r", tmp_path)
    assert "it lies on nfs4: a rollback journal is used instead of WAL" in caplog.text
    db = ledger._store._db
    assert db is not None
    assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert not (tmp_path / "r.db-wal").exists()
    ledger.close()
    monkeypatch.undo()
    store = Store(tmp_path / "r.db")
    assert store._db is not None
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


# ---------------------------------------------------------------------- who is alive


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    one, two = RunLock(tmp_path / "l"), RunLock(tmp_path / "l")
    assert RunLock.alive(tmp_path / "l") is False
    assert one.acquire()
    assert one.acquire(), "twice is fine"
    assert not two.acquire(patience_s=0)
    assert RunLock.alive(tmp_path / "l") is True
    one.release()
    one.release()
    assert RunLock.alive(tmp_path / "l") is False
    assert two.acquire()
    two.release()


def hold(path: str, pipe: object) -> None:
    held = RunLock(Path(path))
    assert held.acquire()
    pipe.send("held")  # type: ignore[attr-defined]
    signal.pause()


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(tmp_path / "l"), theirs))
    process.start()
    assert mine.recv() == "held"
    assert RunLock.alive(tmp_path / "l") is True
    process.kill()
    process.join()
    assert RunLock.alive(tmp_path / "l") is False


def test_a_forked_child_does_not_keep_a_dead_run_alive(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from rlsandbox.ledger.lock import RunLock
held = RunLock(Path({str(tmp_path / "l")!r}))
assert held.acquire()
pid = os.fork()
if pid == 0:
    os.close(1)
    time.sleep(60)
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    child = int(done.stdout)
    try:
        assert done.returncode == -9
        os.kill(child, 0)
        assert RunLock.alive(tmp_path / "l") is False
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lock._flock

    def no_flock(fd: int, *, shared: bool = False) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "lustre")):
            raise OSError(38, "Function not implemented")
        real(fd, shared=shared)

    monkeypatch.setattr(lock, "_flock", no_flock)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    file = tmp_path / "lustre" / "r.db"
    file.parent.mkdir()
    assert lock.alive(file, host="") is False, "there is not even a lock file"
    held = lock.take(file)
    assert held is not None
    assert not held.supported
    assert lock.take(file) is None, "another process of this machine holds it"
    assert lock.alive(file) is True
    held.release()
    assert lock.alive(file, host=os.uname().nodename) is False
    assert lock.alive(file, host="elsewhere") is None, "nobody can tell from here"
