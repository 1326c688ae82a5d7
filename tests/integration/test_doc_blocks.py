"""Every Python block of the documentation runs as it stands; those that cannot are type-checked, with the reason."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.alone import alone

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

TASKS = "tasks = rls.load_tasks('demo', limit=3)\n"
POOL = "pool = rls.Pool(size=2)\n"
HELD = POOL + "sandbox = pool.claim(rls.Task(id='t', workdir='/work', setup='mkdir -p repo/venv/bin'))\n"
ROLLOUTS = TASKS + POOL + "def policy(sandbox, task): return sandbox.run('echo hi').stdout\n"
RUN: dict[tuple[str, int], tuple[str, str]] = {  # what a reader has before the block, and sees after it
    ("README.md", 0): ("", "assert report.mean_reward == 1.0 and report.coverage == 1.0"),
    ("README.md", 1): ("", "env.close(); assert terminated and reward == 0.0"),
    ("environment.md", 0): ("", "assert terminated and reward == 0.0"),
    ("environment.md", 1): (
        "import gymnasium as gym\n",
        "obs, _ = env.reset(seed=0); assert obs\n"
        "obs, reward, *_ = env.step('echo seen'); assert (obs, reward) == ('seen\\n', -0.01); env.close()",
    ),
    ("environment.md", 2): ("import gymnasium as gym\n", "assert (obs['exit_code'] == 0).all()"),
    ("ledger.md", 0): (
        "from rlsandbox.ledger import Ledger\n" + HELD + "ledger = Ledger.open('r', '.')\ntask = rls.Task(id='t')\n",
        "ledger.close(); assert record.reward == 1.0",
    ),
    ("metrics.md", 0): (
        "from rlsandbox.metrics import Snapshot\nfrom_other_ranks = []\nlog = print\n" + POOL
        + "pool.claim(rls.Task(id='t')).run('true')\n",
        "assert whole.to_dict('sandbox/')['sandbox/claims'] == 0.0",
    ),
    ("pools.md", 0): (
        "",
        "with small.claim(rls.Task(id='t')) as sandbox: assert sandbox.run('true').ok\n"
        "assert (pool.size, small.max_size) == (4, 4); pool.close(); small.close()",
    ),
    ("pools.md", 1): (ROLLOUTS, "assert (report.coverage, len(report.records)) == (1.0, 12)"),
    ("reset.md", 0): (
        "revoked = []\nissue = lambda: 'secret'\nrevoke = revoked.append\n",
        "import types; mine = types.SimpleNamespace(rlsandbox_issue_credentials=rlsandbox_issue_credentials,\n"
        "    rlsandbox_revoke_credentials=rlsandbox_revoke_credentials)\n"
        "with rls.Pool(size=1, plugins=[mine]) as pool:\n"
        "    with pool.claim(rls.Task(id='t')) as sandbox:\n"
        "        assert sandbox.run('echo $API_TOKEN').stdout == 'secret\\n'\n"
        "assert revoked == ['lease-1']",
    ),
    ("sandbox.md", 0): (HELD + "path = 'tests'\nsandbox.write_file('/usr/local/bin/pytest', '#!/bin/sh\\necho $*', mode=0o755)\n",
                        "assert r.stdout == '-q tests\\n'"),
    ("sandbox.md", 1): (HELD + "sandbox.run('touch repo/venv/bin/activate')\n", ""),
    ("sandbox.md", 2): (
        POOL + "sandbox = pool.claim(rls.load_tasks('demo')[0])\n", "assert copy.state == 'released'"
    ),
}  # fmt: skip
POOL_T = "pool: rls.Pool\n"
NOT_RUN: dict[tuple[str, int], tuple[str, str]] = {  # why, and what mypy is told
    ("images.md", 0): ("needs a cluster", ""),
    ("kubernetes.md", 0): ("needs a cluster", ""),
    ("kubernetes.md", 1): ("needs two clusters", ""),
    ("trl.md", 0): ("is TRL alone; needs a model", "from typing import Any\ndataset: Any\nreward: Any\n"),
    ("trl.md", 1): ("needs a model: tests/integration/trl runs the same with a small one", ""),
    ("trl.md", 2): ("needs a model: tests/integration/trl runs the same with a small one", ""),
    ("trl.md", 3): (
        "needs a model: tests/integration/trl runs the same with a small one",
        "from typing import Any\nfrom trl import GRPOTrainer\nmodel: Any\nargs: Any\ndataset: Any\n",
    ),
}


def blocks() -> dict[tuple[str, int], str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {
        (page.name, n): match[1] for page in pages for n, match in enumerate(BLOCK.finditer(page.read_text()))
    }


def test_every_block_is_here() -> None:
    """One that is new has to be run, or has its reason."""
    assert set(blocks()) == {*RUN, *NOT_RUN}
    assert not set(RUN) & set(NOT_RUN)


@pytest.mark.parametrize("block", RUN, ids=lambda b: f"{b[0]}-{b[1]}")
def test_it_runs_as_it_stands(block: tuple[str, int], tmp_path: Path) -> None:
    if block == ("metrics.md", 0):
        pytest.importorskip("matplotlib")
    before, after = RUN[block]
    source = f"import rlsandbox as rls\n{before}{blocks()[block]}\n{after}\n"
    (tmp_path / "block.py").write_text(
        "import ast, asyncio, inspect, sys\n"
        "code = compile(open(sys.argv[1]).read(), sys.argv[1], 'exec', ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)\n"
        "done = eval(code, {'__name__': 'block'})\n"
        "if inspect.iscoroutine(done): asyncio.run(done)\n"
        "print('the block has ended')\n"
    )
    (tmp_path / "source.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "block.py", "source.py"],
        cwd=tmp_path,
        env=alone(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the block has ended\n")
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(900)
def test_what_cannot_run_has_its_types_right(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip("trl")
    pytest.importorskip("kubernetes")
    files = []
    for (page, n), (_, told) in NOT_RUN.items():
        source = f"import rlsandbox as rls\n{told}{blocks()[page, n]}"
        ast.parse(source)
        files.append(tmp_path / f"{page.removesuffix('.md')}_{n}.py")
        files[-1].write_text(source)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n"
        # theirs are half a million lines
        "[mypy-trl.*,torch.*,transformers.*,datasets.*,accelerate.*,kubernetes.*]\nfollow_imports = skip\n"
    )
    (tmp_path / "links").mkdir()
    (tmp_path / "links/rlsandbox_trl").symlink_to(ROOT / "integrations/rlsandbox_trl")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "links")])
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *map(str, files)],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
