"""One configuration for a team: argument > variable > file, every value with the place it came from.

Precedence, highest first:

1. arguments of :class:`~rlsandbox.Pool` or of the command line;
2. variables: ``RLSANDBOX_POOL_SIZE``, ``RLSANDBOX_POOL_SPEC_MEMORY``, ``RLSANDBOX_POOL_BACKEND`` ...;
3. ``[profiles.NAME.pool]`` of every file, when a profile was asked for (argument or ``RLSANDBOX_PROFILE``);
4. ``$RLSANDBOX_CONFIG`` or else ``./rlsandbox.toml``;
5. ``~/.config/rlsandbox/config.toml``, then ``/etc/rlsandbox/config.toml``.

Values are merged key by key. What nobody knows (a key, a profile, a variable) is an error that names
the nearest known word; a value of the wrong type is an error that names its place. Nothing is started
and no backend is imported here.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ._settings import BACKEND, METRICS, POOL, SPEC, Kind, nearest
from .errors import ConfigError
from .spec import SPEC_FIELDS, Spec

if TYPE_CHECKING:
    from .backends.base import Backend

FILE_NAME = "rlsandbox.toml"
SYSTEM_FILE = Path("/etc/rlsandbox/config.toml")
DEFAULT_BACKEND = "local"
_OTHER_VARIABLES = ("RLSANDBOX_CONFIG", "RLSANDBOX_PROFILE", "RLSANDBOX_HOME")

PathArgument = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Values of ``[pool]``. None: nobody said; the pool chooses."""

    size: int | None = None
    max_size: int | None = None
    when_empty: Literal["create", "wait", "fail"] = "create"
    max_creating: int | None = None
    write_rate: float | None = None
    run: str | None = None
    ledger: str | None = None
    block: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """Which backend, and what its constructor gets; *instance* when the caller brought an object."""

    name: str = DEFAULT_BACKEND
    options: Mapping[str, Any] = field(default_factory=dict)
    instance: Backend | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Values of ``[metrics]``: exporters that a pool starts by itself when their value is set."""

    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"
    otlp_endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """What applies, and why.

    Args:
        pool: the pool's own settings.
        spec: ``[pool.spec]`` under the variables and the ``spec`` argument, field by field.
        backend: name, options, or the object that was given.
        metrics: exporters.
        profile: the profile that was applied.
        sources: dotted key (``pool.size``) to where its value came from; keys at their default are absent.
        files: the files that were read, highest precedence first.
    """

    pool: PoolSettings
    spec: Spec
    backend: BackendChoice
    metrics: MetricsSettings
    profile: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, Any, str]]:
        """(dotted key, value, source) of every setting, for ``rlsandbox config show``."""
        found: list[tuple[str, Any]] = [("pool.backend.name", self.backend.name)]
        found += [(f"pool.backend.{key}", value) for key, value in sorted(self.backend.options.items())]
        for prefix, part in (("pool", self.pool), ("pool.spec", self.spec), ("metrics", self.metrics)):
            names = SPEC_FIELDS if part is self.spec else [f.name for f in fields(part)]
            found += [(f"{prefix}.{name}", getattr(part, name)) for name in names]
        return [(key, value, self.sources.get(key, "default")) for key, value in found]


def load_config(
    config: PathArgument | Literal[False] | None = None,
    profile: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The settings that apply.

    Args:
        config: a file that takes the place of ``$RLSANDBOX_CONFIG`` and ``./rlsandbox.toml``; ``False``
            ignores every file and variable.
        profile: section ``[profiles.NAME]``; without one, ``$RLSANDBOX_PROFILE``.
        arguments: by name as :class:`~rlsandbox.Pool` takes them; None, and a ``block`` of nothing, count as
            not given. ``backend`` may be a name or a Backend, ``spec`` a Spec.
        environ: instead of the process's environment.

    Raises:
        ConfigError: a file is missing or broken, a key is unknown, a value is of the wrong type.
    """
    variables: Mapping[str, str] = os.environ if environ is None else environ
    if config is not None and config is not False:
        text = os.fspath(config) if isinstance(config, os.PathLike) else config
        if not isinstance(text, str) or not text:
            raise ConfigError(f"config must be a file's path, or False for none, not {config!r}")
    if profile is not None and not isinstance(profile, str):
        raise ConfigError(f"profile must be a name, not {profile!r}")
    layers: list[_Layer] = []
    files: list[str] = []
    if config is not False:
        _refuse_unknown_variables(variables)
        profile = profile or variables.get("RLSANDBOX_PROFILE") or None
        read = [_read(path) for path in _files(config, variables)]
        files = [str(path) for path, _ in read]
        layers.append(_from_variables(variables))
        if profile is not None:
            layers += _from_profiles(read, profile)
        layers += [_from_file(str(path), data) for path, data in read]
    elif profile is not None:
        raise ConfigError(f"profile {profile!r} needs a file, and config=False ignores them all")
    given = {k: v for k, v in (arguments or {}).items() if v is not None}
    if not given.get("block", ()):
        given.pop("block", None)
    backend, spec = given.pop("backend", None), given.pop("spec", None)
    layers.insert(0, _Layer({f"pool.{k}": (v, "argument") for k, v in _checked_arguments(given).items()}))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for key, (value, source) in layer.values.items():
            if key not in values and not key.startswith("pool.backend"):
                values[key], sources[key] = value, source
    if spec is not None and not isinstance(spec, Spec):
        raise ConfigError(f"spec must be a Spec, not {type(spec).__name__}")
    base = Spec(**{k.removeprefix("pool.spec."): v for k, v in values.items() if k.startswith("pool.spec.")})
    if spec is not None:
        for name in spec.given:
            sources[f"pool.spec.{name}"] = "argument"
        base = spec.over(base)
    pool = PoolSettings(**{k: values[f"pool.{k}"] for k in POOL if f"pool.{k}" in values})
    if pool.size is not None and pool.max_size is not None and pool.max_size < pool.size:
        raise ConfigError(
            f"max_size ({pool.max_size}, {sources['pool.max_size']}) must not be below "
            f"size ({pool.size}, {sources['pool.size']})"
        )
    return Config(
        pool=pool,
        spec=base,
        backend=_backend(backend, layers, sources),
        metrics=MetricsSettings(**{k: values[f"metrics.{k}"] for k in METRICS if f"metrics.{k}" in values}),
        profile=profile,
        sources=sources,
        files=tuple(files),
    )


@dataclass(frozen=True)
class _Layer:
    """Dotted key to (value, where it was said)."""

    values: dict[str, tuple[Any, str]]


def _backend(given: object, layers: list[_Layer], sources: dict[str, str]) -> BackendChoice:
    """The highest layer that names a backend decides; options come from layers that mean the same one."""
    name: str | None = None
    if given is not None:
        if given == "":
            raise ConfigError("backend must be a name or a Backend, not ''")
        if not isinstance(given, str):
            label = getattr(given, "name", None)
            if not isinstance(label, str) or not callable(getattr(given, "provision", None)):
                raise ConfigError(f"backend must be a name or a Backend, not {type(given).__name__}")
            sources["pool.backend.name"] = "argument"
            return BackendChoice(name=label, instance=given)  # type: ignore[arg-type]
        name, sources["pool.backend.name"] = given, "argument"
    options: dict[str, Any] = {}
    for layer in layers:
        named = layer.values.get("pool.backend.name")
        if name is None and named is not None:
            name, sources["pool.backend.name"] = named
    name = name or DEFAULT_BACKEND
    for layer in layers:
        named = layer.values.get("pool.backend.name")
        if named is not None and named[0] != name:
            continue
        for key, (value, source) in layer.values.items():
            option = key.removeprefix("pool.backend.")
            if option != key and option != "name" and option not in options:
                options[option], sources[key] = value, source
    return BackendChoice(name=name, options=options)


def _checked_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given) - set(POOL))
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}{nearest(unknown[0], [*POOL, 'spec', 'backend'])}")
    return {key: POOL[key].check(value, key) for key, value in given.items()}


def _files(config: PathArgument | None, variables: Mapping[str, str]) -> list[Path]:
    """Paths to read, highest first. A file that was named must exist; the others may."""
    named = [(Path(config), "config=")] if config is not None else []
    if not named and variables.get("RLSANDBOX_CONFIG"):
        named = [(Path(variables["RLSANDBOX_CONFIG"]), "$RLSANDBOX_CONFIG")]
    for path, by in named:
        if not _is_file(path):
            raise ConfigError(f"{by} names {path}, which is not a file")
    paths = [path for path, _ in named] or [Path(FILE_NAME)]
    if not named and os.path.islink(FILE_NAME) and not _is_file(Path(FILE_NAME)):
        raise ConfigError(f"./{FILE_NAME} is a link to what is not there")
    home = variables.get("HOME") or os.path.expanduser("~")
    base = variables.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    paths += [Path(base, "rlsandbox", "config.toml"), SYSTEM_FILE]
    return [path for path in paths if _is_file(path)]


def _is_file(path: Path) -> bool:
    """False also where nobody can tell: under the home of another user (sudo without -H), a name too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def _read(path: Path) -> tuple[Path, Mapping[str, Any]]:
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # numbers too long, nested too deep
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _table(data: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} must be a table ([{name}]), not {value!r}")
    return value


def _known(data: Mapping[str, Any], known: list[str], where: str, section: str) -> None:
    for key in data:
        if key not in known:
            place = f" in [{section}]" if section else ""
            raise ConfigError(f"{where}: unknown key {key!r}{place}{nearest(key, known)}")


def _from_file(path: str, data: Mapping[str, Any]) -> _Layer:
    _known(data, ["pool", "profiles", "metrics"], path, "")
    for name, profile in _table(data, "profiles", path).items():  # checked even when not asked for
        _section(profile, path, f"profiles.{name}")
    return _section({k: v for k, v in data.items() if k != "profiles"}, path, "")


def _section(data: Any, path: str, name: str) -> _Layer:
    """``pool`` and ``metrics`` of a file or of one of its profiles."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: {name} must be a table, not {data!r}")
    _known(data, ["pool", "metrics"], path, name)
    prefix = f"{name}." if name else ""
    source = f"{path} [{name}]" if name else path
    pool = _table(data, "pool", path)
    values: dict[str, tuple[Any, str]] = {}

    def take(table: Mapping[str, Any], kinds: Mapping[str, Kind], section: str, key_prefix: str) -> None:
        for key, value in table.items():
            where = f"{path}: [{prefix}{section}] {key}"
            values[f"{key_prefix}.{key}"] = (kinds[key].check(value, where), source)

    _known(pool, [*POOL, "spec", "backend"], path, f"{prefix}pool")
    take({k: v for k, v in pool.items() if k in POOL}, POOL, "pool", "pool")
    spec = _table(pool, "spec", path)
    _known(spec, list(SPEC), path, f"{prefix}pool.spec")
    take(spec, SPEC, "pool.spec", "pool.spec")
    try:
        Spec(**{key: values[f"pool.spec.{key}"][0] for key in spec})
    except ConfigError as error:
        raise ConfigError(f"{path}: [{prefix}pool.spec] {error.message}") from None
    backend = pool.get("backend", {})
    if isinstance(backend, str):  # backend = "local" is as good as [pool.backend] name = "local"
        backend = {"name": backend}
    if not isinstance(backend, Mapping):
        raise ConfigError(f"{path}: [{prefix}pool] backend must be a name or a table, not {backend!r}")
    for key, value in backend.items():
        where = f"{path}: [{prefix}pool.backend] {key}"
        values[f"pool.backend.{key}"] = (BACKEND.check(value, where) if key == "name" else value, source)
    metrics = _table(data, "metrics", path)
    _known(metrics, list(METRICS), path, f"{prefix}metrics")
    take(metrics, METRICS, "metrics", "metrics")
    return _Layer(values)


def _from_profiles(read: list[tuple[Path, Mapping[str, Any]]], profile: str) -> list[_Layer]:
    names: list[str] = []
    layers = []
    for path, data in read:
        profiles = _table(data, "profiles", str(path))
        names += profiles
        if profile in profiles:
            layers.append(_section(profiles[profile], str(path), f"profiles.{profile}"))
    if not layers:
        places = ", ".join(str(path) for path, _ in read) or "no configuration file was found"
        raise ConfigError(f"unknown profile {profile!r}{nearest(profile, names)} (looked in: {places})")
    return layers


def _variable_kinds() -> dict[str, tuple[str, Kind]]:
    """Variable name to (dotted key, kind)."""
    kinds = {f"RLSANDBOX_POOL_{k.upper()}": (f"pool.{k}", kind) for k, kind in POOL.items()}
    kinds |= {f"RLSANDBOX_POOL_SPEC_{k.upper()}": (f"pool.spec.{k}", kind) for k, kind in SPEC.items()}
    kinds |= {f"RLSANDBOX_METRICS_{k.upper()}": (f"metrics.{k}", kind) for k, kind in METRICS.items()}
    kinds["RLSANDBOX_POOL_BACKEND"] = ("pool.backend.name", BACKEND)
    return kinds


def _from_variables(variables: Mapping[str, str]) -> _Layer:
    kinds = _variable_kinds()
    values: dict[str, tuple[Any, str]] = {}
    for name, text in variables.items():
        if name in kinds and text != "":
            key, kind = kinds[name]
            values[key] = (kind.check(kind.parse(text, name), name), name)
        elif name.startswith("RLSANDBOX_POOL_BACKEND_") and text != "":
            option = name.removeprefix("RLSANDBOX_POOL_BACKEND_").lower()
            values["pool.backend." + option] = (_guess(text), name)
    spec = {k.removeprefix("pool.spec."): v for k, v in values.items() if k.startswith("pool.spec.")}
    for key, (value, source) in spec.items():
        try:
            Spec(**{key: value})
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.message}") from None
    return _Layer(values)


def _refuse_unknown_variables(variables: Mapping[str, str]) -> None:
    known = [*_variable_kinds(), *_OTHER_VARIABLES]
    for name in variables:
        if name in known or not name.startswith("RLSANDBOX_") or name.startswith("RLSANDBOX_POOL_BACKEND_"):
            continue
        ours = name.startswith(("RLSANDBOX_POOL_", "RLSANDBOX_METRICS_"))
        # A variable of a plugin or a test may begin with RLSANDBOX_ too: refused only when it looks mistyped.
        if ours or difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            raise ConfigError(f"unknown variable {name}{nearest(name, known)}")


def _guess(text: str) -> Any:
    """A backend's option in a variable: a TOML value where it is one, else the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text
