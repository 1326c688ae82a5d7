"""The keeper brought into a pod that runs already, whose template does not carry it (``keeper="inject"``).

It is written there by an exec stream and started beside the container's own process, so all it can be is mode
``replace``; the image must hold ``sh``, ``head``, ``chmod`` and a directory to write into.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...errors import ProvisionError, SandboxDiedError
from ...keeper.build import keeper_binary
from .api import Api
from .exec import ExecStream

PLACE = "/tmp/.rlsandbox"
CONNECT = [f"{PLACE}/keeper", "connect", PLACE]
START_S = 30.0
_CHUNK = 24 << 10
_SCRIPT = """
set -e; umask 022; d=$1; n=$2; shift 2
mkdir -p "$d"; head -c "$n" > "$d/new"; chmod 755 "$d/new"; mv "$d/new" "$d/keeper"
"$d/keeper" init --run "$d" --mode replace --network host "$@" < /dev/null > "$d/said" 2>&1 &
i=0; while [ ! -S "$d/s/keeper" ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
[ -S "$d/s/keeper" ] && echo started || { cat "$d/said" >&2; exit 1; }
"""


async def inject(api: Api, pod: str, container: str, arch: str, options: Sequence[str]) -> None:
    """
    Raises:
        ProvisionError: the image lacks what it takes, or the keeper did not start.
    """
    binary = await asyncio.to_thread(lambda: keeper_binary(arch).read_bytes())
    command = ["sh", "-c", _SCRIPT, "sh", PLACE, str(len(binary)), *options]
    said = b""
    try:
        async with asyncio.timeout(START_S):
            stream = await ExecStream.open(api, pod, container, command)
            try:
                for at in range(0, len(binary), _CHUNK):
                    await stream.send(binary[at : at + _CHUNK])
                while piece := await stream.recv():
                    said += piece
                    if b"started" in said:
                        return
            finally:
                await stream.close()
    except SandboxDiedError:
        raise
    except (OSError, TimeoutError) as error:
        raise ProvisionError(
            f"the keeper could not be brought into pod {pod}: {error or 'no end'}", kind="inject", sandbox=pod
        ) from error
    raise ProvisionError(
        f"the keeper could not be started in pod {pod}: {stream.why or 'nothing was said'}",
        kind="inject", retryable=False, sandbox=pod,
        hint="the image must hold sh, head and chmod; better: a template with the stanza",
    )  # fmt: skip
