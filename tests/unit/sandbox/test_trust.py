"""What of a rollout's changes is put back before grading."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlsandbox import Grader, Spec
from rlsandbox._sandbox.trust import Trust, pytest_section, told
from rlsandbox.results import FileInfo


class Client:
    """Files now and at the baseline."""

    def __init__(self, now: dict[str, str], before: dict[str, str]) -> None:
        self.now, self.before = now, before

    async def outside_read(self, path: str, *, baseline: bool, limit: int, since: str | None) -> bytes | None:
        found = (self.before if baseline else self.now).get(path)
        return None if found is None else found.encode()


def trust(
    workdir: str = "/work", *, client: Any = None, env: dict[str, str] | None = None, **how: Any
) -> Trust:
    sandbox: Any = SimpleNamespace(
        primed="p1", reset_mode="overlay", workdir=workdir, spec=Spec(env=env or {}, expose=("/data/tools", "python")), base_env={},
        path=lambda place: f"{workdir}/{place}" if not place.startswith("/") else place,
        client=client or Client({}, {}),
    )  # fmt: skip
    return Trust(sandbox, Grader(command="true", **how))


async def foreign(of: Trust, *paths: str) -> list[str]:
    """A path that ends with a slash is a directory, one that begins with ``-`` was deleted."""
    infos = [
        FileInfo(
            name=path.strip("-").rstrip("/"), size=0, mode=0o644,
            kind="dir" if path.endswith("/") else "deleted" if path.startswith("-") else "file",
        )
        for path in paths
    ]  # fmt: skip
    return [info.name for info in await of.foreign(infos)]


async def test_topmost_paths_and_never_one_that_holds_work() -> None:
    changed = ["/usr/", "/usr/bin/", "/usr/bin/sh", "/usr/src/", "/usr/src/app/", "/usr/src/app/a", "/usr/x"]
    assert await foreign(trust(), *changed) == ["/usr"]
    assert await foreign(trust("/usr/src/app"), *changed) == ["/usr/bin", "/usr/x"]
    assert await foreign(trust(work=["/usr/bin/sh"]), *changed) == ["/usr/src", "/usr/x"]
    assert await foreign(trust(work=["/"]), *changed) == []
    assert await foreign(trust("/"), *changed, "/made", "/root/x") == ["/usr"]


async def test_what_a_spec_adds_is_trusted_too() -> None:
    of = trust(env={"PATH": "/venv/bin:/data/bin::relative", "HOME": "/home/agent"})
    changed = ["/venv/bin/python", "/venv/lib/x.py", "/venv/other", "/data/tools/x", "/data/set"]
    homes = [
        "/home/agent/.bashrc",
        "/home/agent/.cache/x",
        "/home/agent/notes",
        "/home/other/bin/x",
        "-/root/.profile",
    ]
    assert await foreign(of, *changed, *homes) == [
        "/data/tools/x", "/home/agent/.bashrc", "/home/other/bin/x", "/root/.profile", "/venv/bin/python",
        "/venv/lib/x.py",
    ]  # fmt: skip


async def test_git_of_the_task_and_of_the_rollout() -> None:
    client = Client({}, {"/work/.git/HEAD": "ref: x"})
    theirs = [
        "/work/.git/config",
        "/work/.git/hooks/pre-commit",
        "/work/.git/refs/heads/x",
        "/work/.git/index",
    ]
    mine = ["/work/new/.git/config", "/work/new/.git/hooks/pre-commit"]
    found = await foreign(trust(client=client), "/work/.git/", "/work/.git/hooks/", *theirs, *mine)
    assert found == ["/work/.git/config", "/work/.git/hooks/pre-commit"]
    assert await foreign(trust(client=client), "/work/.git") == ["/work/.git"], "no directory any more"
    assert await foreign(trust(client=client, work=["."]), *theirs) == []


async def test_pytest_s_section_of_a_file_that_is_the_work_otherwise() -> None:
    before = {"/work/pyproject.toml": "[project]\nname = 'a'\n", "/work/setup.cfg": "[metadata]\nname = a\n"}
    now = {
        "/work/pyproject.toml": "[project]\nname = 'b'\n[tool.pytest.ini_options]\naddopts = '--co'\n",
        "/work/setup.cfg": "[metadata]\nname = b\n",
        "/work/new/tox.ini": "[pytest]\naddopts = -p evil\n",
        "/work/other/tox.ini": "[tox]\nenvlist = py\n",
    }
    assert await foreign(trust(client=Client(now, before)), *now) == [
        "/work/new/tox.ini",
        "/work/pyproject.toml",
    ]


async def test_many_of_them_are_read_some_at_a_time() -> None:
    """Thousands, which one after the other would take minutes, and at once would take the trainer's memory."""

    class Slow(Client):
        at_once = most = 0

        async def outside_read(
            self, path: str, *, baseline: bool, limit: int, since: str | None
        ) -> bytes | None:
            assert limit == 65536
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0)
            self.at_once -= 1
            return await super().outside_read(path, baseline=baseline, limit=limit, since=since)

    evil = {f"/work/{n:04}/pyproject.toml": "[tool.pytest.ini_options]\n" for n in range(0, 1000, 7)}
    now = {f"/work/{n:04}/pyproject.toml": "[tool.black]\n" for n in range(1000)} | evil
    client = Slow(now, {})
    assert await foreign(trust(client=client), *now) == list(evil)
    assert 2 <= client.most <= 64

    async def broken(path: str, *, baseline: bool, limit: int, since: str | None) -> bytes | None:
        raise ConnectionResetError(path)

    client.outside_read = broken  # type: ignore[method-assign]
    with pytest.raises(ConnectionResetError):
        await foreign(trust(client=client), *now)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("pyproject.toml", "[tool.pytest.ini_options]\nx = 1", {"ini_options": {"x": 1}}),
        ("pyproject.toml", "not [ toml", None),
        ("pyproject.toml", "tool = 3", None),
        ("setup.cfg", "[tool:pytest]\naddopts = -x", {"tool:pytest": {"addopts": "-x"}}),
        ("tox.ini", "[pytest]\n[pytest]\naddopts=-x", {"pytest": {"addopts": "-x"}}),
        ("tox.ini", "no section = 1", None),
    ],
)
def test_sections(name: str, text: str, said: Any) -> None:
    assert pytest_section(name, text.encode()) == said
    assert pytest_section(name, None) is None


def test_a_line_names_some_and_counts_the_rest() -> None:
    assert told(["a", "b"]) == "a, b"
    assert told(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_what_is_too_deep_for_us_counts_as_configuration() -> None:
    """It may not be too deep for the pytest in the sandbox."""
    for text in ("x = " + "[" * 5000 + "]" * 5000, "x = " + "9" * 5000):
        assert pytest_section("/w/pyproject.toml", text.encode()) == text


async def test_a_read_that_fails_leaves_no_other_running() -> None:
    running = 0

    class Fails(Client):
        async def outside_read(
            self, path: str, *, baseline: bool, limit: int, since: str | None
        ) -> bytes | None:
            nonlocal running
            if not baseline:
                raise OSError("gone")
            running += 1
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return b""

    with pytest.raises(OSError, match="gone"):
        await foreign(trust(client=Fails({}, {})), "/work/setup.cfg")
    assert running == 0
