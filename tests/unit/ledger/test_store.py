"""The store: order, durability, a disk that fails in every way, and where things go then."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from rlsandbox.errors import LedgerError
from rlsandbox.ledger import LedgerWarning
from rlsandbox.ledger import store as store_module
from rlsandbox.ledger.reading import events_of
from rlsandbox.ledger.store import LEAST_FREE
from tests.support.faulty_sqlite import ERRORS, faulty
from tests.support.small_disk import fill, small_disk


class Store(store_module.Store):
    """As at work: opened, trouble is a warning."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.opening = False


def rows(path: Path) -> list[tuple[int, str, str | None, dict[str, object]]]:
    return [(e.n, e.kind, e.rollout, e.data) for e in events_of(path)]


def wait_until(true, what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


def test_what_is_appended_is_in_the_file_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    for i in range(1234):
        store.append("note", f"r/{i}", {"i": i})
    assert store.flush_blocking(10)
    assert [(n, r, d["i"]) for n, _, r, d in rows(store.path)] == [(i + 1, f"r/{i}", i) for i in range(1234)]
    store.close()
    assert not (tmp_path / "a.db-wal").exists(), "a closed ledger is one file"
    again = Store(tmp_path / "a.db")
    again.append("note", None, {"i": "later"})
    again.close()
    assert [n for n, *_ in rows(store.path)] == list(range(1, 1236))


def test_many_threads_lose_and_mix_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")

    def work(name: int) -> None:
        for i in range(300):
            store.append("note", str(name), {"i": i})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    seen = rows(store.path)
    assert len(seen) == 2400
    for name in range(8):
        assert [d["i"] for _, _, r, d in seen if r == str(name)] == list(range(300))


async def test_flush_waits_for_the_commit_without_blocking_the_loop(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    for i in range(2000):
        store.append("note", None, {"i": i, "text": "x" * 200})
    before = ticks
    assert await store.flush()
    assert ticks > before, "the loop stood still"
    assert len(rows(store.path)) == 2000
    ticker.cancel()
    await asyncio.gather(ticker, return_exceptions=True)
    await asyncio.to_thread(store.close)


async def test_a_flush_that_is_cancelled_disturbs_nobody(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    store.append("note", None, {})
    waiting = asyncio.ensure_future(store.flush())
    await asyncio.sleep(0)
    waiting.cancel()
    store.append("note", None, {})
    assert await store.flush()
    assert len(rows(store.path)) == 2
    await asyncio.to_thread(store.close)


def test_any_text_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    ugly = "".join(map(chr, [0, 1, 0x7F, 0x85, 0x2028, 0xDFFF, 0xD800, 0x1F600])) + "'\"\\\n"
    store.append("note", None, {"text": ugly, ugly: 1})
    store.append("note", "r/\ud800/0", {})
    store.close()
    (_, _, _, data), (_, _, rollout, _) = rows(store.path)
    assert data == {"text": ugly, ugly: 1}
    assert rollout == "r/\\ud800/0"


def test_bookkeeping_takes_what_json_does_not_know(tmp_path: Path) -> None:
    import numpy as np

    store = Store(tmp_path / "a.db")
    store.append("note", None, {"a": np.int64(3), "b": np.array([1.5, 2.0]), "c": Path("/x"), "d": {1}})
    store.close()
    ((_, _, _, data),) = rows(store.path)
    assert data == {"a": 3, "b": [1.5, 2.0], "c": "/x", "d": "{1}"}


def test_it_is_append_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    store.append("note", None, {})
    store.close()
    with sqlite3.connect(store.path) as db:
        for sql in ("UPDATE events SET kind='x'", "DELETE FROM events"):
            with pytest.raises(sqlite3.Error, match="append-only"):
                db.execute(sql)
    db.close()


def test_the_wall_clock_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "a.db")
    store.append("note", None, {})
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86_400)
    store.append("note", None, {})
    store.close()
    first, second = events_of(store.path)
    assert 0 <= second.at - first.at < 60


# ---------------------------------------------------------------------- refused when opened


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.db").mkdir()
    with pytest.raises(LedgerError, match=r"a\.db cannot be opened for writing: it is a directory"):
        Store(tmp_path / "a.db")


def test_another_programs_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="another program's SQLite file"):
        Store(path)
    assert path.read_bytes() == before


def test_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_text("hello\n" * 1000)
    with pytest.raises(LedgerError, match="it is no SQLite database") as caught:
        Store(path)
    assert "Pool(ledger=" in str(caught.value)
    assert path.read_text() == "hello\n" * 1000


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LedgerError, match="format 99, this version of rlsandbox knows 1"):
        Store(path)


def test_a_read_only_place_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        Store(disk / "a.db").close()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for name in ("a.db", "b.db", "c/d.db"):
            with pytest.raises(LedgerError, match=r"read-only") as caught:
                Store(disk / name)
            assert "\n" not in str(caught.value)


def test_a_full_disk_is_refused_before_work_starts(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        fill(disk, leave=LEAST_FREE // 2)
        with pytest.raises(LedgerError, match=r"the disk is full \(\d+ KiB free"):
            Store(disk / "a.db")
        assert not (disk / "a.db").exists()


# ---------------------------------------------------------------------- trouble during work


def test_a_disk_that_fills_up_holds_records_in_memory_and_writes_them_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        store = Store(disk / "a.db")
        store.append("note", "before", {})
        assert store.flush_blocking(10)
        filler = fill(disk)

        def work() -> None:
            for i in range(500):
                store.append("note", f"during/{i}", {"text": "x" * 4000})
            assert not store.flush_blocking(10)
            wait_until(lambda: "kept in memory" in caplog.text, "a warning")

        with pytest.warns(LedgerWarning, match="the disk is full.*kept in memory"):
            work()
        assert "the disk is full" in (store.trouble or "")
        assert not store.flush_blocking(10), "known to be held: answered at once"
        assert len(store.pending()) == 500
        filler.unlink()
        wait_until(lambda: store.trouble is None and not store.pending(), "the disk has room again")
        assert store.flush_blocking(1)
        assert [r for _, _, r, _ in rows(store.path)] == ["before", *(f"during/{i}" for i in range(500))]
        assert caplog.text.count("kept in memory") == 1
        wait_until(lambda: "can be written again" in caplog.text, "word of it")
        store.close()


def test_a_disk_that_stays_full_sends_records_elsewhere_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    with small_disk(tmp_path / "disk", "4m") as disk:
        store = Store(disk / "a.db")
        store.append("note", "r/before/0", {})
        assert store.flush_blocking(10)
        fill(disk)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(3):
                store.append("note", f"r/t/{i}", {"text": "x" * 100_000})
            store.close(timeout=0.5)
        said = [str(w.message) for w in caught]
        (dump,) = (tmp_path / "home").glob("a-*.jsonl")
        assert any(
            f"3 events of 3 rollouts could not be written to the ledger {store.path}" in s for s in said
        )
        assert any(str(dump) in s and "rlsandbox ledger report" in s for s in said)
        assert [e.rollout for e in events_of(dump)] == [f"r/t/{i}" for i in range(3)]
        assert [r for _, _, r, _ in rows(store.path)] == ["r/before/0"], "the ledger itself is sound"
        assert dump.stat().st_mode & 0o777 == 0o600


def test_when_there_is_no_other_place_it_says_exactly_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        monkeypatch.setenv("RLSANDBOX_HOME", str(disk / "home"))
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(disk))
        monkeypatch.chdir(disk)
        store = Store(disk / "a.db")
        fill(disk)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(3):
                store.append("note", f"r/t/{i}", {"text": "x" * 100_000})
            store.close(timeout=0.3)
        (lost,) = [str(w.message) for w in caught if "LOST" in str(w.message)]
        assert "3 events of 3 rollouts" in lost
        assert "r/t/0, r/t/1, r/t/2" in lost
        assert not list(disk.glob("*.jsonl")), "nothing half-made is left"
        monkeypatch.chdir(tmp_path)


def test_a_file_that_is_removed_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "runs" / "a.db")
    for i in range(50):
        store.append("note", f"before/{i}", {})
    assert store.flush_blocking(10)
    for file in list((tmp_path / "runs").iterdir()):
        file.unlink()
    (tmp_path / "runs").rmdir()
    with caplog.at_level("WARNING"):
        store.append("note", "after", {})
        assert store.flush_blocking(10)
    assert "was removed while in use" in caplog.text
    assert [r for _, _, r, _ in rows(store.path)] == [*(f"before/{i}" for i in range(50)), "after"]
    store.close()
    assert len(rows(store.path)) == 51


def test_a_file_that_another_takes_the_place_of_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    store = Store(tmp_path / "a.db")
    store.append("note", "before", {})
    assert store.flush_blocking(10)
    os.rename(tmp_path / "a.db", tmp_path / "moved.db")
    (tmp_path / "a.db").write_text("mine")

    def work() -> None:
        store.append("note", "after", {})
        assert not store.flush_blocking(10)

    with pytest.warns(LedgerWarning, match="another file took the place"):
        work()
    with pytest.warns(LedgerWarning, match="2 events of 2 rollouts"):
        store.close(timeout=0.3)
    assert (tmp_path / "a.db").read_text() == "mine"
    (dump,) = tmp_path.glob("a-*.jsonl")
    assert [e.rollout for e in events_of(dump)] == ["before", "after"], "all of it: nobody else can reach it"


def test_warnings_that_are_errors_stop_nothing(tmp_path: Path) -> None:
    with faulty(lambda n, what: "full" if "BEGIN" in what else None):
        store = Store(tmp_path / "a.db")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.append("note", "x", {})
            assert not store.flush_blocking(10)
            store.close(timeout=0.2)
    (dump,) = tmp_path.glob("a-*.jsonl")
    assert [e.rollout for e in events_of(dump)] == ["x"]


# ---------------------------------------------------------------------- every SQLite call fails in turn


def scenario(path: Path) -> tuple[list[str], list[str]]:
    """Open, write 20 rollouts in 4 batches, close. Those that were acknowledged, and all."""
    store = Store(path)
    done, asked = [], []
    for batch in range(4):
        for i in range(5):
            name = f"r/{batch}/{i}"
            store.append("note", name, {})
            asked.append(name)
        if store.flush_blocking(30):
            done = list(asked)
    store.close(timeout=0.05)
    return done, asked


def count_calls(tmp_path: Path) -> list[str]:
    with faulty(lambda n, what: None) as faults:
        scenario(tmp_path / "count.db")
    return faults.calls


@pytest.mark.parametrize("kind", list(ERRORS))
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from-then-on"])
@pytest.mark.filterwarnings("ignore::rlsandbox.ledger.LedgerWarning")
def test_each_sqlite_call_fails(tmp_path: Path, kind: str, lasting: bool) -> None:
    calls = count_calls(tmp_path)
    assert len(calls) > 20
    assert {"connect", "executescript", "close"} <= set(calls)
    for failing in range(len(calls)):
        place = tmp_path / f"{failing}"
        place.mkdir()
        with faulty(lambda n, what, at=failing: kind if n == at or (lasting and n > at) else None) as faults:
            try:
                done, asked = scenario(place / "a.db")
            except LedgerError as error:
                refused = str(error)
            else:
                refused = ""
        if refused:
            assert "cannot be opened for writing" in refused, calls[failing]
            assert "\n" not in refused
            assert failing <= calls.index("execute SELECT coalesce") + 1, "work had begun"
            continue
        assert faults.raised, calls[failing]
        found = [e.rollout for e in events_of(place / "a.db")]
        dumps = list(place.glob("*.jsonl"))
        elsewhere = [e.rollout for dump in dumps for e in events_of(dump)]
        assert found == done or set(done) <= set(found), f"acknowledged and not there: {calls[failing]}"
        assert sorted({*found, *elsewhere}) == sorted(asked), f"{kind} at {calls[failing]}"
        assert len(found) == len(set(found)), "twice"
        with sqlite3.connect(place / "a.db") as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()


# ---------------------------------------------------------------------- other processes


def test_a_forked_child_is_told_and_harms_nothing(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from rlsandbox.ledger.store import Store
from rlsandbox.errors import LedgerError
store = Store(Path({str(tmp_path / "a.db")!r}))
store.append("note", "parent", {{}})
assert store.flush_blocking(10)
pid = os.fork()
if pid == 0:
    try:
        store.append("note", "child", {{}})
    except LedgerError as error:
        store.close()
        sys.exit(7 if "not to its child" in str(error) else 8)
    sys.exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
store.append("note", "parent again", {{}})
store.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
    assert [r for _, _, r, _ in rows(tmp_path / "a.db")] == ["parent", "parent again"]


def test_leaving_the_interpreter_without_closing_writes_what_is_queued(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from rlsandbox.ledger.store import Store
store = Store(Path({str(tmp_path / "a.db")!r}))
for i in range(3000):
    store.append("note", str(i), {{}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(rows(tmp_path / "a.db")) == 3000


def test_a_reader_sees_a_living_ledger(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    for i in range(10):
        store.append("note", str(i), {})
        assert store.flush_blocking(10)
        assert len(rows(store.path)) == i + 1
    store.close()


def test_killed_with_a_commit_acknowledged_it_is_there(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from rlsandbox.ledger.store import Store
store = Store(Path({str(tmp_path / "a.db")!r}))
for i in range(100):
    store.append("note", str(i), {{}})
assert store.flush_blocking(10)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "a.db-wal").exists(), "killed in the middle of things"
    assert len(rows(tmp_path / "a.db")) == 100
    store = Store(tmp_path / "a.db")
    store.append("note", "next", {})
    store.close()
    assert len(rows(tmp_path / "a.db")) == 101


def test_closing_twice_and_appending_after(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    store.close()
    store.close()
    with pytest.raises(LedgerError, match="is closed"):
        store.append("note", None, {})


def test_a_dump_with_a_broken_line_says_which(tmp_path: Path) -> None:
    dump = tmp_path / "x.jsonl"
    good = {"n": 1, "at": 0.0, "kind": "note", "rollout": None, "data": {}}
    dump.write_text(json.dumps(good) + "\n{broken\n")
    with pytest.raises(LedgerError, match=r"x\.jsonl, line 2"):
        events_of(dump)


def test_logs_stay_quiet_when_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rlsandbox"):
        store = Store(tmp_path / "a.db")
        store.append("note", None, {})
        store.close()
    assert not caplog.records
