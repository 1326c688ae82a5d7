"""Precedence, sources and refusals of the configuration."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest

import rlsandbox.config as config_module
from rlsandbox._settings import nearest
from rlsandbox.config import Config, load_config
from rlsandbox.errors import ConfigError
from rlsandbox.spec import Spec


class Places:
    """A home, a working directory and a system file of the test's own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cwd, self.home = root / "cwd", root / "home"
        self.cwd.mkdir()
        self.environ = {"HOME": str(self.home)}
        self.project = self.cwd / "rlsandbox.toml"
        self.user = self.home / ".config" / "rlsandbox" / "config.toml"
        self.system = root / "etc" / "config.toml"
        self.named = root / "named.toml"
        for path in (self.user, self.system):
            path.parent.mkdir(parents=True)
        monkeypatch.chdir(self.cwd)
        monkeypatch.setattr(config_module, "SYSTEM_FILE", self.system)

    def load(self, *args: Any, **variables: str) -> Config:
        return load_config(*args, environ={**self.environ, **variables})


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    return Places(tmp_path, monkeypatch)


def test_nothing_anywhere_gives_defaults(places: Places) -> None:
    config = places.load()
    assert config.backend.name == "local"
    assert config.pool.size is None
    assert config.pool.when_empty == "create"
    assert config.spec == Spec()
    assert config.sources == {}
    assert {source for _, _, source in config.rows()} == {"default"}


def test_each_place_beats_those_below_it(places: Places) -> None:
    """Every subset of the six places: the highest of the subset wins and is named as the source."""
    ranked = ["argument", "variable", "profile", "project", "user", "system"]
    texts = {"project": "[pool]\nsize = 4\n", "user": "[pool]\nsize = 5\n", "system": "[pool]\nsize = 6\n"}
    sizes = dict(zip(ranked, range(1, 7), strict=True))
    for n in range(1, 7):
        for chosen in itertools.combinations(ranked, n):
            for name, text in texts.items():
                path = getattr(places, name)
                path.write_text(text if name in chosen else "")
            if "profile" in chosen:  # in the lowest file: asked for by name, it still beats plain sections
                with places.system.open("a") as file:
                    file.write("[profiles.eval.pool]\nsize = 3\n")
            config = places.load(
                None,
                "eval" if "profile" in chosen else None,
                {"size": 1} if "argument" in chosen else {},
                **({"RLSANDBOX_POOL_SIZE": "2"} if "variable" in chosen else {}),
            )
            best = chosen[0]
            assert config.pool.size == sizes[best], chosen
            source = config.sources["pool.size"]
            expected = {
                "argument": "argument",
                "variable": "RLSANDBOX_POOL_SIZE",
                "profile": f"{places.system} [profiles.eval]",
                "project": "rlsandbox.toml",
                "user": str(places.user),
                "system": str(places.system),
            }
            assert source == expected[best]


def test_a_named_file_takes_the_place_of_the_project_file(places: Places) -> None:
    places.project.write_text("[pool]\nsize = 4\nmax_size = 9\n")
    places.named.write_text("[pool]\nsize = 7\n")
    places.user.write_text("[pool]\nwrite_rate = 2.5\n")
    for config in (
        places.load(places.named),
        places.load(None, None, {}, RLSANDBOX_CONFIG=str(places.named)),
    ):
        assert config.pool.size == 7
        assert config.pool.max_size is None
        assert config.pool.write_rate == 2.5
        assert config.files == (str(places.named), str(places.user))


def test_false_ignores_files_and_variables(places: Places) -> None:
    places.project.write_text("[pool]\nsize = 4\nnonsense = 1\n")
    config = places.load(False, None, {"size": 2}, RLSANDBOX_POOL_WRITE_RATE="nonsense")
    assert config.pool.size == 2
    assert config.pool.write_rate is None
    with pytest.raises(ConfigError, match="config=False"):
        places.load(False, "eval")


def test_a_whole_team_file(places: Places) -> None:
    places.system.write_text(
        """
        [pool]
        size = 256
        when_empty = "wait"
        block = ["git"]
        [pool.backend]
        name = "kubernetes"
        context = ["a", "b"]
        [pool.spec]
        cpu = 1
        memory = "2GiB"
        env = {A = "1"}
        [profiles.eval.pool]
        size = 64
        [profiles.eval.pool.spec]
        memory = "1GiB"
        [metrics]
        prometheus_port = 9464
        otlp_endpoint = "http://otel:4317"
        """
    )
    config = places.load(None, "eval", {"spec": Spec(cpu=2, env={"B": "2"})})
    assert (config.pool.size, config.pool.when_empty, config.pool.block) == (64, "wait", ("git",))
    assert config.backend.name == "kubernetes"
    assert config.backend.options == {"context": ["a", "b"]}
    assert config.spec == Spec(cpu=2, memory="1GiB", env={"A": "1", "B": "2"})
    assert config.metrics.prometheus_port == 9464
    assert config.sources["pool.spec.cpu"] == "argument"
    assert config.sources["pool.spec.memory"].endswith("[profiles.eval]")


def test_options_of_another_backend_do_not_apply(places: Places) -> None:
    places.project.write_text('[pool.backend]\nname = "kubernetes"\nnamespace = "rl"\n')
    assert places.load().backend.options == {"namespace": "rl"}
    local = places.load(None, None, {"backend": "local"})
    assert (local.backend.name, dict(local.backend.options)) == ("local", {})
    by_variable = places.load(
        None, None, {}, RLSANDBOX_POOL_BACKEND="local", RLSANDBOX_POOL_BACKEND_BASE="/x"
    )
    assert (by_variable.backend.name, dict(by_variable.backend.options)) == ("local", {"base": "/x"})
    places.project.write_text('[pool]\nbackend = "simulated"\n')
    assert places.load().backend.name == "simulated"


def test_variables_have_the_types_of_their_keys(places: Places) -> None:
    config = places.load(
        None,
        None,
        {},
        RLSANDBOX_POOL_WRITE_RATE="0.5",
        RLSANDBOX_POOL_BLOCK="git, tmp",
        RLSANDBOX_POOL_SPEC_ENV="A=1,B=x=y",
        RLSANDBOX_POOL_SPEC_MEMORY="512MiB",
        RLSANDBOX_METRICS_PROMETHEUS_PORT="9999",
        RLSANDBOX_POOL_BACKEND_DEPTH="3",
        RLSANDBOX_POOL_MAX_SIZE="",
    )
    assert config.pool.write_rate == 0.5
    assert config.pool.max_size is None
    assert config.pool.block == ("git", "tmp")
    assert config.spec.env == {"A": "1", "B": "x=y"}
    assert config.spec.memory == "512MiB"
    assert config.metrics.prometheus_port == 9999
    assert config.backend.options == {"depth": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pool]\nsizee = 4\n", r"unknown key 'sizee' in \[pool\]: did you mean 'size'"),
        ("[pol]\nsize = 4\n", "unknown key 'pol': did you mean 'pool'"),
        ("[pool.spec]\nmemmory = 1\n", r"unknown key 'memmory' in \[pool.spec\]: did you mean 'memory'"),
        ("[metrics]\nport = 1\n", "did you mean 'prometheus_port'"),
        ("[profiles.x.pool]\nsizee = 4\n", r"unknown key 'sizee' in \[profiles.x.pool\]"),
        ("[profiles.x]\nsize = 4\n", r"unknown key 'size' in \[profiles.x\]"),
        ("[pool]\nsize = 'four'\n", r"\[pool\] size must be a whole number of at least 1, not 'four'"),
        ("[pool]\nsize = -4\n", "size must be a whole number of at least 1, not -4"),
        ("[pool]\nsize = true\n", "size must be a whole number"),
        ("[pool]\nsize = 1.5\n", "size must be a whole number"),
        ("[pool]\nwrite_rate = 0\n", "write_rate must be a number above 0"),
        ("[pool]\nwrite_rate = nan\n", "write_rate must be a number above 0"),
        ("[pool]\nwhen_empty = 'maybe'\n", "when_empty must be one of create, wait, fail"),
        ("[pool]\nblock = 'git'\n", "block must be a list of strings"),
        ("[pool]\nblock = [1]\n", "block must be a list of strings"),
        ("[pool.spec]\nmemory = 'lots'\n", "memory must be bytes"),
        ("[pool.spec]\nmemory = 0\n", r"\[pool.spec\] Spec.memory must be above 0"),
        ("[pool.spec]\nexpose = ['usr']\n", "neither an absolute path"),
        ("[pool.spec]\nnetwork = 'some'\n", "network must be one of none, host"),
        ("[pool.spec]\nenv = {A = 1}\n", "env must map names to strings"),
        ("[pool.backend]\nname = 3\n", "name must be a string"),
        ("[pool]\nbackend = 3\n", "backend must be a name or a table"),
        ("[metrics]\nprometheus_port = 70000\n", "from 1 to 65535"),
        ("pool = 3\n", "pool must be a table"),
        ("[pool\n", "not valid TOML"),
        ("x = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
        ("[pool]\nsize = " + "9" * 5000, "not valid TOML"),
        ("[pool]\nsize = 4\nmax_size = 2\n", r"max_size \(2, rlsandbox.toml\) must not be below"),
    ],
)
def test_a_wrong_file_is_one_clear_line(places: Places, text: str, said: str) -> None:
    places.project.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        places.load()
    assert "\n" not in str(caught.value)
    assert "rlsandbox.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RLSANDBOX_POOL_SISE": "4"}, "RLSANDBOX_POOL_SISE: did you mean 'RLSANDBOX_POOL_SIZE'"),
        ({"RLSANDBOX_POL_SIZE": "4"}, "did you mean 'RLSANDBOX_POOL_SIZE'"),
        ({"RLSANDBOX_POOL_SIZE": "-4"}, "RLSANDBOX_POOL_SIZE must be a whole number of at least 1, not -4"),
        ({"RLSANDBOX_POOL_SIZE": "four"}, "not 'four'"),
        ({"RLSANDBOX_POOL_SPEC_ENV": "A"}, "RLSANDBOX_POOL_SPEC_ENV must be NAME=value"),
        ({"RLSANDBOX_POOL_SPEC_EXPOSE": "usr"}, "RLSANDBOX_POOL_SPEC_EXPOSE: .*neither an absolute path"),
        ({"RLSANDBOX_CONFIG": "/nowhere.toml"}, r"\$RLSANDBOX_CONFIG names /nowhere.toml"),
        ({"RLSANDBOX_PROFILE": "evil"}, "unknown profile 'evil'"),
    ],
)
def test_a_wrong_variable_is_named(places: Places, variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        places.load(None, None, {}, **variables)


def test_foreign_variables_are_left_alone(places: Places) -> None:
    assert places.load(None, None, {}, RLSANDBOX_PLUGIN_OF_MINE="1").sources == {}


def test_wrong_arguments(places: Places) -> None:
    with pytest.raises(ConfigError, match="size must be a whole number of at least 1, not -1"):
        places.load(None, None, {"size": -1})
    with pytest.raises(ConfigError, match="unknown argument 'sizee': did you mean 'size'"):
        places.load(None, None, {"sizee": 1})
    with pytest.raises(ConfigError, match="spec must be a Spec, not dict"):
        places.load(None, None, {"spec": {}})
    with pytest.raises(ConfigError, match="backend must be a name or a Backend, not int"):
        places.load(None, None, {"backend": 3})
    with pytest.raises(ConfigError, match="config= names"):
        places.load("missing.toml")


@pytest.mark.parametrize("wrong", [True, 5, b"x.toml", "", ["x.toml"], Path])
def test_what_is_no_path_is_refused(places: Places, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="config must be a file's path, or False for none, not "):
        places.load(wrong)


@pytest.mark.parametrize("wrong", [5, ["train"], b"train", True])
def test_what_is_no_profile_is_refused(places: Places, wrong: Any) -> None:
    places.project.write_text("[profiles.train.pool]\nsize = 1\n")
    with pytest.raises(ConfigError, match="profile must be a name, not "):
        places.load(None, wrong)


def test_numbers_of_any_type(places: Places) -> None:
    found = places.load(None, None, {"size": numpy.int64(4), "write_rate": numpy.float32(0.5)}).pool
    assert (found.size, found.write_rate) == (4, 0.5)
    assert (type(found.size), type(found.write_rate)) == (int, float)
    for wrong in (numpy.float64(4), numpy.bool_(True), numpy.int64(0), "4"):
        with pytest.raises(ConfigError, match="size must be a whole number"):
            places.load(None, None, {"size": wrong})


def test_a_link_to_what_is_not_there_is_not_passed_over(places: Places) -> None:
    places.project.symlink_to("nowhere.toml")
    with pytest.raises(ConfigError, match=r"rlsandbox\.toml is a link to what is not there"):
        places.load()
    assert places.load(False).pool.size is None


def test_of_very_many_known_names_only_some_are_told() -> None:
    assert nearest("zzz", ["a", "b"]) == "; known: a, b"
    said = nearest("zzz", [f"n{i:03}" for i in range(331)])
    assert said.startswith("; known: n000, n001, ")
    assert said.endswith(", n029 ... (331 in all)")
    assert nearest("n30", [f"n{i:03}" for i in range(331)]).startswith(": did you mean 'n")


def test_unknown_profile_names_the_nearest(places: Places) -> None:
    places.system.write_text("[profiles.train.pool]\nsize = 1\n")
    with pytest.raises(ConfigError, match="unknown profile 'trian': did you mean 'train'"):
        places.load(None, "trian")


def test_a_backend_object_is_taken_as_it_is(places: Places) -> None:
    class Mine:
        name = "mine"

        async def provision(self) -> None: ...

    mine = Mine()
    places.project.write_text('[pool.backend]\nname = "kubernetes"\nnamespace = "rl"\n')
    choice = places.load(None, None, {"backend": mine}).backend
    assert choice.instance is mine
    assert (choice.name, dict(choice.options)) == ("mine", {})


def test_a_file_with_a_byte_order_mark(places: Places) -> None:
    places.project.write_bytes(b"\xef\xbb\xbf[pool]\r\nsize = 4\r\n")
    assert places.load().pool.size == 4


def test_a_home_that_nobody_may_look_into_holds_no_settings(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sudo without -H: HOME is another user's."""
    real = Path.is_file

    def is_file(path: Path) -> bool:
        if path == places.user:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert places.load().pool.size is None


def test_nothing_is_no_value(places: Places) -> None:
    for wrong in ({"size": []}, {"max_size": ()}, {"backend": ""}, {"block": "git"}, {"ledger": 5}):
        with pytest.raises(ConfigError):
            places.load(None, None, wrong)
    assert places.load(None, None, {"block": ()}).pool.block == ()
