"""By what the API server knows us: tokens, certificates, exec plugins of a kubeconfig, or our pod's account.

The official client's loader reads kubeconfigs. What it does about exec plugins and renewal is done here: a
plugin that fails, hangs or prints something else is an error that says so (not an anonymous request), and a
refused request has the file, the token file or the plugin asked again, once for all that wait for it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

from kubernetes.aio import config as _config
from kubernetes.aio.config import kube_config as _kube_config
from kubernetes.aio.config.config_exception import ConfigException

from ...errors import ConfigError, ProvisionError, SandboxError

log = logging.getLogger("rlsandbox.kubernetes")
k8s_config: Any = _config
kube_config: Any = _kube_config  # the client says nothing of its types

PLUGIN_S = 60.0
"""How long an exec plugin may take: nobody is there to answer its questions."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FILES = ("cert_file", "key_file")


class Credentials:
    """Those of one context, put into a client's *settings* by :meth:`load` and :meth:`renew`.

    Args:
        settings: ``kubernetes.aio.client.Configuration``.
        files: kubeconfigs; none: the service account of the pod that we are in.
        path: as whoever reads an error knows them.
        context: default the current one.
    """

    def __init__(self, settings: Any, files: list[str], path: str, context: str | None) -> None:
        self.settings, self._files, self._path, self._context = settings, files, path, context
        self.number = 0
        """Of the credentials in use: a request that is refused says with which it was made."""
        self.trouble = ""
        """Why there are no newer ones."""
        self._loader: Any = None
        self._attempts = 0
        self._lock = asyncio.Lock()

    async def load(self) -> dict[str, Any]:
        """The context that is used; empty in a pod.

        Raises:
            ConfigError: there is no such context, a file is none.
            ProvisionError: a plugin gives no credentials now.
        """
        if not self._files:
            try:
                await self._look_again()
            except ConfigException as error:
                raise ConfigError(
                    f"the service account of this pod cannot be used: {_one_line(error)}"
                ) from error
            return {}
        try:
            self._loader = await self._read(self.settings)
            current: dict[str, Any] = self._loader.current_context
        except SandboxError:
            raise
        except ConfigException as error:
            known, _ = contexts(self._files)
            raise ConfigError(
                f"kubeconfig {self._path}: {_one_line(error)}"
                + (f" (context {self._context!r})" if self._context else ""),
                hint=f"contexts there: {', '.join(known)}" if known else "",
            ) from error
        except Exception as error:  # whatever a broken file makes of the parser
            raise ConfigError(f"kubeconfig {self._path} cannot be read: {_one_line(error)}") from error
        self._context = current["name"]  # also when somebody makes another one the current one
        return current

    async def renew(self, number: int) -> bool:
        """Look for newer ones than *number*, which were refused; False when there are none."""
        asked = self._attempts
        async with self._lock:
            if self.number != number:
                return True  # another request has brought them
            if self._attempts != asked:
                return False  # another one has looked meanwhile
            self._attempts += 1
            before = dict(self.settings.api_key), self.certificates()
            try:
                await self._look_again()
            except Exception as error:
                self.trouble = _one_line(error) or type(error).__name__
                log.warning("credentials could not be renewed: %s", self.trouble)
                return False
            self.trouble = ""
            if (dict(self.settings.api_key), self.certificates()) == before:
                return False
            self.number += 1
            return True

    def certificates(self) -> tuple[tuple[str, int], ...]:
        """Which files are our certificate and its key now; empty: we have none."""
        files = [getattr(self.settings, name) for name in _FILES]
        return tuple((file, os.stat(file).st_mtime_ns) for file in files if file)

    async def _look_again(self) -> None:
        if not self._files:
            k8s_config.load_incluster_config(client_configuration=self.settings)
            _tidy(self.settings)
            return
        if self._loader.provider:  # what such a loader has been given since is in its memory only
            await self._loader.load_and_set(self.settings)
            _tidy(self.settings)
            return
        found = type(self.settings)()
        self._loader = await self._read(found)
        self.settings.api_key = dict(found.api_key)  # the cluster stays the one that it was
        for name in _FILES:
            setattr(self.settings, name, getattr(found, name))

    async def _read(self, settings: Any) -> Any:
        loader = kube_config.KubeConfigLoader(
            config_dict=kube_config.KubeConfigMerger(os.pathsep.join(self._files)).config,
            config_base_path=None,
            active_context=self._context,
        )

        async def by_plugin() -> bool:
            await self._by_plugin(loader)
            return True

        loader.load_from_exec_plugin = by_plugin
        await loader.load_and_set(settings)
        _tidy(settings)
        return loader

    async def _by_plugin(self, loader: Any) -> None:
        how = loader._user["exec"].value
        base = os.path.join(os.getcwd(), os.path.dirname(loader._user.path))
        status = await run_plugin(how, cluster=loader._cluster.value, base=base, where=self._path)
        token, certificate, key = (
            status.get(name) for name in ("token", "clientCertificateData", "clientKeyData")
        )
        by_token = token.strip() if isinstance(token, str) else ""
        pair = (certificate, key) if isinstance(certificate, str) and isinstance(key, str) else ()
        if not by_token and not pair:
            raise ConfigError(
                f"kubeconfig {self._path}: the exec plugin {how.get('command')!r} gave neither a token nor a"
                " certificate with its key"
            )
        if by_token:
            loader.token = f"Bearer {by_token}"
        for name, text in zip(_FILES, pair, strict=False):
            data = base64.b64encode(text.encode()).decode()
            setattr(loader, name, kube_config.FileOrData({"x-data": data}, "x").as_file())


async def run_plugin(
    how: dict[str, Any], *, cluster: dict[str, Any], base: str, where: str
) -> dict[str, Any]:
    """The ``status`` of the ExecCredential that a plugin prints.

    Args:
        how: the stanza ``exec`` of a kubeconfig's user.
        cluster: what the kubeconfig says of the cluster, for a plugin that wants to know.
        base: the kubeconfig's directory; a command with a slash in it is meant from there.
        where: the kubeconfig, for errors.

    Raises:
        ConfigError: it is not there, or of another version.
        ProvisionError: it fails, takes too long, or prints something else (``unauthorized``).
    """
    command, version = how.get("command"), how.get("apiVersion")
    if not isinstance(command, str) or not command or not isinstance(version, str):
        raise ConfigError(f"kubeconfig {where}: a user's `exec` needs command and apiVersion")
    said = f"kubeconfig {where}: the exec plugin {command!r}"
    hint = " ".join(str(how.get("installHint") or "").split())
    if how.get("interactiveMode") == "Always":
        raise ConfigError(f"{said} wants a terminal (interactiveMode: Always), and there is none")
    if os.sep in command and not os.path.isabs(command):
        command = os.path.join(base, command)
    spec: dict[str, Any] = {"interactive": False}
    if how.get("provideClusterInfo"):
        spec["cluster"] = _cluster_info(cluster, base)
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    extra = {str(row["name"]): str(row["value"]) for row in how.get("env") or ()}
    try:
        process = await asyncio.create_subprocess_exec(
            command, *(str(part) for part in how.get("args") or ()),
            env={**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{said} cannot be started: {error.strerror or error}", hint=hint) from error
    try:
        async with asyncio.timeout(PLUGIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise _refused(f"{said} had not ended after {PLUGIN_S:.0f} s", hint) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        last = f": {' '.join(lines[-1].split())[:300]}" if lines else ""
        raise _refused(f"{said} ended with {process.returncode}{last}", hint)
    try:
        told = json.loads(out)
    except ValueError:
        told = None  # not shown: it may be what is secret
    if not isinstance(told, dict) or not isinstance(told.get("status"), dict):
        raise _refused(f"{said} printed no ExecCredential with a status", hint)
    if told.get("apiVersion") != version:
        raise ConfigError(f"{said} speaks {told.get('apiVersion')}, and the kubeconfig says {version}")
    return dict(told["status"])


def _refused(said: str, hint: str) -> ProvisionError:
    """The plugin is there and gives nothing now: of several clusters, the others go on."""
    return ProvisionError(said, kind="unauthorized", phase="config", retryable=False, hint=hint)


def _cluster_info(cluster: dict[str, Any], base: str) -> dict[str, Any]:
    names = (
        "server",
        "tls-server-name",
        "insecure-skip-tls-verify",
        "certificate-authority-data",
        "proxy-url",
    )
    found = {name: cluster[name] for name in names if cluster.get(name)}
    if "certificate-authority-data" not in found and cluster.get("certificate-authority"):
        file = Path(base, cluster["certificate-authority"])
        found["certificate-authority-data"] = base64.b64encode(file.read_bytes()).decode()
    for row in cluster.get("extensions") or ():
        if row.get("name") == "client.authentication.k8s.io/exec":
            found["config"] = row.get("extension")
    return found


def contexts(files: list[str]) -> tuple[list[str], str]:
    """Names of the contexts in *files*, and of the current one; for hints."""
    try:
        rows, current = k8s_config.list_kube_config_contexts(os.pathsep.join(files))
        return [row["name"] for row in rows], current["name"]
    except Exception:  # only for a hint
        return [], ""


def _tidy(settings: Any) -> None:
    """A token file that an editor wrote ends with a newline, which no header may."""
    for name, key in settings.api_key.items():
        settings.api_key[name] = key.strip()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
