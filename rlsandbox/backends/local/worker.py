"""Runs one job in a process of its own: unpacking, building a base, removing files that carry foreign ids.

The caller's event loop stays free, a cancelled job's process is killed and awaited, and where files need
several owners without root, the process works inside a user namespace. The job's code is :mod:`.jobs`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ImageError, ProvisionError, SandboxError, UnsupportedError
from .ids import IdMap
from .ids import tool as ids_tool

_ERRORS: dict[str, type[SandboxError]] = {"image": ImageError, "provision": ProvisionError}

_HERE = Path(__file__).resolve().parent

# Packages by hand, so that the job imports its own few modules and not the whole library.
_BOOT = """
import sys, types
for name, path in {packages!r}:
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from rlsandbox.backends.local import jobs
jobs.main()
"""


async def call(job: str, arguments: dict[str, Any], ids: IdMap) -> Any:
    """Run *job* (a name of :data:`.jobs.JOBS`) with *arguments*; what it returns.

    Raises:
        ImageError, ProvisionError: as the job says.
    """
    here = _HERE
    packages = [
        ("rlsandbox", str(here.parents[1])),
        ("rlsandbox.backends", str(here.parent)),
        ("rlsandbox.backends.local", str(here)),
    ]
    python = sys.executable or shutil.which("python3") or "python3"
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-c", _BOOT.format(packages=packages), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        return await _talk(process, job, arguments, ids)
    finally:
        # The worker ends when its stdin does. No process outlives the call, also when we are cancelled.
        # (kill() would look for the process's end and take it away from the loop's own watcher.)
        if process.stdin is not None:
            process.stdin.close()
        await ended(process)


async def _talk(process: Process, job: str, arguments: dict[str, Any], ids: IdMap) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    request = {"job": job, "arguments": arguments, "namespace": ids.namespace}
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        if ids.namespace and (await process.stdout.readline()) == b"map\n":
            await _map(process.pid, ids)
            process.stdin.write(b"go\n")
            await process.stdin.drain()
        answer = await process.stdout.read()
    except (BrokenPipeError, ConnectionResetError):
        answer = b""
    try:
        data = json.loads(answer)
    except ValueError:
        said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        status = await process.wait()
        raise ProvisionError(
            f"the {job} worker ended with {status}: {said[-1] if said else 'no word'}"
        ) from None
    if "error" in data:
        raise _ERRORS[data["error"]](
            data["message"], kind=data["kind"] or None, hint=data["hint"], retryable=data.get("retryable")
        )
    return data["result"]


async def ended(process: Process) -> None:
    """Wait until *process* has ended, however often we are cancelled meanwhile."""
    cancelled = False
    while process.returncode is None:
        try:
            await asyncio.shield(process.wait())
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def succeeded(process: Process, did: Callable[[], object]) -> bool:
    """Whether an ended *process* did its work; *did*, a look at that, says it where no status reaches us."""
    unknown = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    return bool(did()) if unknown else process.returncode == 0


async def _map(pid: int, ids: IdMap) -> None:
    for tool, ranges in (("newuidmap", ids.uids), ("newgidmap", ids.gids)):
        numbers = [str(number) for triple in ranges for number in triple]
        process = await asyncio.create_subprocess_exec(
            ids_tool(tool) or tool, str(pid), *numbers, stdout=PIPE, stderr=PIPE
        )
        try:
            _, said = await process.communicate()
        finally:
            await ended(process)
        if not succeeded(process, Path(f"/proc/{pid}/{tool[3:6]}_map").read_text):
            raise UnsupportedError(
                f"{tool} failed: {said.decode(errors='replace').strip()}",
                phase="provision",
                hint="check /etc/subuid and /etc/subgid, and that newuidmap and newgidmap are setuid root",
            )
