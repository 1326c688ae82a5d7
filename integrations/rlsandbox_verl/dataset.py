"""The data set for verl: ``python -m rlsandbox_verl.dataset tasks.jsonl train.parquet``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

import rlsandbox as rls
from rlsandbox.errors import ConfigError, UnsupportedError


def to_parquet(
    tasks: Iterable[rls.Task] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    agent_name: str = "sandbox_agent",
    system: str | None = None,
    source: str | None = None,
) -> int:
    """Write a row for each task as verl's RLHFDataset reads it; their number.

    A row names its task and where that is found; the tasks themselves (files, graders) stay there, and the
    pool's owner reads them.

    Args:
        tasks: tasks, or where :func:`rlsandbox.load_tasks` finds them.
        path: the file to write.
        agent_name: the loop's name in the YAML file.
        system: a system message before the task's prompt.
        source: where the pool's owner finds tasks that were made in code: ``pkg.mod:fn``.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UnsupportedError(
            "to_parquet needs pyarrow", phase="config", hint="pip install pyarrow"
        ) from error

    if isinstance(tasks, (str, os.PathLike)):
        source = source or _absolute(os.fspath(tasks))
        tasks = rls.load_tasks(tasks)
    rows = []
    for index, task in enumerate(tasks):
        start = [{"role": "system", "content": system}] if system else []
        rows.append(
            {
                "data_source": "rlsandbox",
                "agent_name": agent_name,
                "prompt": [*start, {"role": "user", "content": task.prompt}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "task_id": task.id, "task_source": source or _source(task)},
            }
        )
    if not rows:
        raise ConfigError("there are no tasks")
    parquet.write_table(pyarrow.Table.from_pylist(rows), os.fspath(path))
    return len(rows)


def _absolute(source: str) -> str:
    return os.path.abspath(source) if os.path.exists(source) else source


def _source(task: rls.Task) -> str:
    loaded = task.metadata.get("loaded_from")
    if not isinstance(loaded, str):
        raise ConfigError(
            f"task {task.id!r} was made in code: the pool's owner could not find it",
            hint="source='pkg.mod:fn', a function that gives the tasks",
            task=task.id,
        )
    return loaded.rpartition("#")[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlsandbox_verl.dataset", description=__doc__)
    parser.add_argument("tasks", help="as for rlsandbox.load_tasks")
    parser.add_argument("path", help="the parquet file to write")
    parser.add_argument("--agent-name", default="sandbox_agent")
    parser.add_argument("--system", help="a system message before each prompt")
    given = parser.parse_args()
    n = to_parquet(given.tasks, given.path, agent_name=given.agent_name, system=given.system)
    print(f"{n} tasks -> {given.path}")


if __name__ == "__main__":
    main()
