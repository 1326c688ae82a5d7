"""Task, Grader, Spec and Limits: what they accept, what they refuse and how they travel."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import Credentials, Grader, Limits, Spec, Task, _settings, load_tasks
from rlsandbox.errors import ConfigError
from rlsandbox.spec import SPEC_FIELDS, parse_size

TASK = Task(
    id="t", prompt="p", workdir="/w", files={"a": "text", "b": b"\0bytes"}, setup="true",
    grader=Grader(command=["sh", "check.sh"], files={"check.sh": "true"}, reward="file:/r"),
    spec=Spec(memory="512MiB", env={"A": "b"}, expose=("/opt",)), limits=Limits(steps=3), metadata={"n": [1]},
)  # fmt: skip


def test_data_copies_to_itself_and_travels() -> None:
    for one in (TASK, TASK.spec, TASK.grader, TASK.limits):
        assert copy.deepcopy(one) is copy.copy(one) is one
        again = pickle.loads(pickle.dumps(one))
        assert again == one
    assert hash(pickle.loads(pickle.dumps(TASK))) == hash(TASK)
    with pytest.raises(AttributeError):
        TASK.id = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Task("t")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("said", "size"),
    [(7, 7), ("7", 7), ("7B", 7), ("512MiB", 512 << 20), ("512Mi", 512 << 20), ("512M", 512 * 10**6),
     ("512MB", 512 * 10**6), ("1.5 GiB", 3 << 29), ("2tib", 2 << 40), ("1k", 1000)],
)  # fmt: skip
def test_sizes(said: str | int, size: int) -> None:
    assert parse_size(said) == size


@pytest.mark.parametrize("said", [-1, True, 1.5, None, "", "MiB", "-5", "1 parsec", "nan", "1e3", b"1"])
def test_what_is_no_size(said: Any) -> None:
    with pytest.raises(ConfigError, match="memory must"):
        parse_size(said, "Spec.memory")


WRONG: list[tuple[type, dict[str, Any], str]] = [
    (Spec, {"cpu": 0}, "Spec.cpu must be a number above 0"),
    (Spec, {"cpu": float("nan")}, "Spec.cpu must be a number above 0"),
    (Spec, {"pids": 1.5}, "Spec.pids must be a whole number above 0"),
    (Spec, {"memory": 0}, "Spec.memory must be above 0"),
    (Spec, {"disk": "lots"}, "Spec.disk must be bytes"),
    (Spec, {"network": "lan"}, "Spec.network must be one of none, host"),
    (Spec, {"isolation": "vm"}, "Spec.isolation must be one of"),
    (Spec, {"image": 3}, "Spec.image must be text"),
    (Spec, {"image": ""}, "Spec.image must be text"),
    (Spec, {"user": True}, "Spec.user must be text"),
    (Spec, {"user": b"root"}, "Spec.user must be text"),
    (Spec, {"env": {"A=B": "c"}}, "the name without '='"),
    (Spec, {"env": {"A": 1}}, "must be strings"),
    (Spec, {"env": ["A=b"]}, "Spec.env must map names to strings"),
    (Spec, {"expose": "/opt"}, "Spec.expose must be a tuple of paths"),
    (Spec, {"expose": ("opt",)}, "'opt' is neither an absolute path"),
    (Limits, {"steps": 0}, "Limits.steps must be a whole number above 0"),
    (Limits, {"wall": -1}, "Limits.wall must be a number above 0"),
    (Limits, {"output": "x"}, "Limits.output must be bytes"),
    (Grader, {"command": ""}, "Grader.command must not be empty"),
    (Grader, {"command": []}, "Grader.command must not be empty"),
    (Grader, {"command": 3}, "Grader.command must be text or a list of text"),
    (Grader, {"command": ["a", 3]}, "Grader.command must be text or a list of text"),
    (Grader, {"command": "a", "timeout": 0}, "Grader.timeout must be a number above 0"),
    (Grader, {"command": "a", "reward": "maybe"}, "Grader.reward must be 'exit_code'"),
    (Grader, {"command": "a", "reward": None}, "Grader.reward must be text"),
    (Grader, {"command": "a", "files": {"../x": ""}}, "must not contain '..'"),
    (Grader, {"command": "a\0"}, "must be UTF-8 text without NUL"),
    (Grader, {"command": ["a", "\ud800"]}, "must be UTF-8 text without NUL"),
    (Grader, {"command": "a", "fresh": "no"}, "Grader.fresh must be True or False"),
    (Spec, {"env": {"A": "\ud800"}}, "must be strings in UTF-8"),
    (Spec, {"memory": "9" * 5000}, "Spec.memory is more than any machine has"),
    (Task, {"id": "\ud800"}, "Task.id must be text that UTF-8 can say"),
    (Task, {"id": "t", "prompt": 5}, "Task.prompt must be text, not int"),
    (Task, {"id": "t", "setup": "echo \ud800"}, "Task.setup must be text that UTF-8 can say"),
    (Credentials, {"id": ""}, "Credentials.id must be text"),
    (Credentials, {"id": "c", "env": None}, "Credentials.env must be a mapping"),
    (Credentials, {"id": "c", "env": {"A": 5}}, "Credentials.env: 'A' must be a name"),
    (Credentials, {"id": "c", "env": {"A=": "x"}}, "Credentials.env: 'A=' must be a name"),
    (Credentials, {"id": "c", "env": {"A": "\ud800"}}, "its value UTF-8 text"),
    (Credentials, {"id": "c", "files": {"/a": 5}}, "its value bytes"),
    (Task, {"id": ""}, "Task.id must be a string"),
    (Task, {"id": 3}, "Task.id must be a string"),
    (Task, {"id": "t", "workdir": "here"}, "Task.workdir must be an absolute path"),
    (Task, {"id": "t", "workdir": 3}, "Task.workdir must be text"),
    (Task, {"id": "t", "setup": ["true"]}, "Task.setup must be text"),
    (Task, {"id": "t", "files": ["a"]}, "Task.files must map paths"),
    (Task, {"id": "t", "files": {"a/": ""}}, "is not a file path"),
    (Task, {"id": "t", "files": {"a": 3}}, "must be text or bytes, not int"),
    (Task, {"id": "t", "files": {"a": "\ud800"}}, "cannot be written as UTF-8"),
    (Task, {"id": "t", "grader": "true"}, "Task.grader must be a Grader, not str"),
    (Task, {"id": "t", "spec": {"cpu": 1}}, "Task.spec must be a Spec, not dict"),
    (Task, {"id": "t", "limits": None}, "Task.limits must be a Limits, not NoneType"),
    (Task, {"id": "t", "metadata": None}, "Task.metadata must be a Mapping"),
]


@pytest.mark.parametrize(("cls", "how", "said"), WRONG, ids=lambda v: repr(v)[:40])
def test_what_is_wrong_is_said_where_it_is_made(cls: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**how)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_people_have_at_hand_is_taken() -> None:
    assert Spec(image=Path("/images/py.tar")).image == "/images/py.tar"  # type: ignore[arg-type]
    assert Task(id="t", image=Path("x")).image == "x"  # type: ignore[arg-type]
    assert Spec(user=1000).user == "1000"  # type: ignore[arg-type]
    assert len(Spec(image=Path("x")).digest) == 16  # type: ignore[arg-type]


def test_task_over_image_over_pool_field_by_field() -> None:
    pool = Spec(image="pool", cpu=2, memory="1GiB", env={"A": "1", "B": "1"}, network="host")
    task = Task(id="t", image="task", spec=Spec(memory="2GiB", env={"B": "2"}))
    spec = task.spec_over(pool)
    assert (spec.image, spec.cpu, spec.memory, spec.network) == ("task", 2, "2GiB", "host")
    assert spec.env == {"A": "1", "B": "2"}
    assert Task(id="t", image="a", spec=Spec(image="b")).spec_over(pool).image == "b"
    assert Task(id="t").spec_over(None) == Spec()


# What a pool may say, and what a task says against it: the default of the field, where it has one.
TIGHTER: dict[str, tuple[Any, Any]] = {
    "image": ("pool.tar", "task.tar"), "cpu": (2, 1.5), "memory": ("2GiB", "1GiB"), "disk": ("2GiB", 5),
    "pids": (100, 7), "network": ("host", "none"), "user": ("0", "1000"), "env": ({"A": "1"}, {"A": ""}),
    "isolation": ("none", "auto"), "expose": (("/opt",), ()), "labels": ({"a": "b"}, {"a": "c"}),
}  # fmt: skip


def test_every_field_is_in_the_table() -> None:
    assert set(TIGHTER) == set(SPEC_FIELDS) == set(_settings.SPEC)


@pytest.mark.parametrize("name", TIGHTER)
def test_a_field_that_is_given_counts_also_when_it_is_given_its_default(name: str) -> None:
    theirs, mine = TIGHTER[name]
    pool = Spec(**{name: theirs})
    task = Task(id="t", spec=Spec(**{name: mine}))
    for one in (
        task,
        copy.deepcopy(task),
        pickle.loads(pickle.dumps(task)),
        dataclasses.replace(task, id="u"),
    ):
        assert getattr(one.spec_over(pool), name) == mine
    others = Spec(**{other: TIGHTER[other][1] for other in TIGHTER if other != name})
    assert getattr(Task(id="t", spec=others).spec_over(pool), name) == theirs
    if name not in ("network", "isolation", "env", "labels", "expose"):  # there None leaves it open
        assert getattr(Spec(**{name: None}).over(pool), name) == theirs


def test_what_was_given_survives_whatever_a_spec_goes_through() -> None:
    closed = Spec(network="none")
    assert closed.given == ("network",) and Spec().given == () == Spec(memory=None, env={}).given
    assert closed != Spec() and closed.digest == Spec().digest  # the same sandbox, but they act differently
    assert repr(closed) == "Spec(network='none')" and eval(repr(closed)) == closed
    assert pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(closed)))) == closed
    assert dataclasses.replace(Spec(), network="none") == closed
    assert dataclasses.replace(closed, memory="1GiB") == Spec(network="none", memory="1GiB")
    assert dataclasses.replace(Spec(network="host", pids=3), network="none") == Spec(network="none", pids=3)
    assert dataclasses.replace(Spec(), pids=3) == Spec(pids=3)
    assert Spec(**dataclasses.asdict(closed)) == closed
    assert Spec(**dataclasses.asdict(Spec())) == Spec()
    assert closed.over(Spec(network="host", cpu=1)) == Spec(network="none", cpu=1)
    assert Spec(cpu=1).over(closed).over(Spec(network="host")) == Spec(cpu=1, network="none")
    with pytest.raises(ConfigError, match=r"Spec.given must be names of fields"):
        Spec(given=("netwrok",))


def test_a_task_file_tightens_too(tmp_path: Path) -> None:
    pool = Spec(network="host", expose=("/opt",), isolation="none", env={"A": "1"})
    (tmp_path / "t.jsonl").write_text(
        '{"id": "a", "spec": {"network": "none", "expose": [], "isolation": "auto"}}\n'
        '{"id": "b", "spec": {"network": null}}\n'
    )
    a, b = load_tasks(tmp_path / "t.jsonl")
    assert a.spec_over(pool) == Spec(network="none", expose=(), isolation="auto", env={"A": "1"})
    assert b.spec_over(pool) == pool


def test_digests_tell_what_makes_another_sandbox_or_layer() -> None:
    assert Spec(memory="1GiB").digest == Spec(memory=1 << 30).digest != Spec(memory="2GiB").digest
    assert Spec(env={"A": "1", "B": "2"}).digest == Spec(env={"B": "2", "A": "1"}).digest
    assert Task(id="a").layer_key is None
    same = Task(id="a", files={"x": "y", "z": ""}, setup="s", prompt="one")
    assert same.layer_key == Task(id="b", files={"z": b"", "x": b"y"}, setup="s", prompt="two").layer_key
    others = [
        Task(id="a", files={"x": "y"}, setup="s"), Task(id="a", files={"x": "yz"}, setup="s"),
        Task(id="a", files={"x": "y", "z": ""}, setup="t"), Task(id="a", files={"x": "y", "z": ""}, setup="s", workdir="/w"),
    ]  # fmt: skip
    keys = {same.layer_key, *(other.layer_key for other in others)}
    assert len(keys) == 5


def test_what_is_no_plugin_is_refused() -> None:
    from rlsandbox.hooks import plugin_manager

    with pytest.raises(ConfigError, match="has no function marked"):
        plugin_manager([object()])
    with pytest.raises(ConfigError, match="block must be a list of names"):
        plugin_manager(block="git")


def test_tasks_come_from_a_name_or_a_path() -> None:
    with pytest.raises(ConfigError, match="takes a name or a path, not int"):
        load_tasks(3)  # type: ignore[arg-type]


def test_files_of_credentials_may_be_text() -> None:
    assert Credentials(id="c", files={"/k": "é"}).files == {"/k": "é".encode()}


def test_a_hook_that_there_is_not_is_an_error_that_names_the_nearest() -> None:
    from rlsandbox.hooks import hookimpl, plugin_manager

    class Acme:
        @hookimpl
        def rlsandbox_verfy(self) -> None: ...

    class Later:
        @hookimpl(optionalhook=True)
        def rlsandbox_of_a_later_version(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Acme: there is no hook rlsandbox_verfy.*rlsandbox_verify"):
        plugin_manager([Acme()])
    plugin_manager([Later()])


def test_files_may_have_names_that_are_no_text() -> None:
    """As Linux has them: bytes, each that is no UTF-8 said by a lone surrogate."""
    names = ["a\udcff", "a\udcfe", "a?"]
    keys = {Task(id="t", files={name: "x"}).layer_key for name in names}
    assert len(keys) == 3
    with pytest.raises(ConfigError, match="half a surrogate pair, which no path can"):
        Task(id="t", files={"a\ud800": "x"})
    with pytest.raises(ConfigError, match="half a surrogate pair, which no path can"):
        Grader(command="true", files={"a\ud800": "x"})
