"""A reward function for answers that are code: the task's grader runs on it, in a sandbox of the job's
pool."""

from __future__ import annotations

import math
import re
from typing import Any

import rlsandbox as rls
from rlsandbox.errors import ConfigError

from .owner import job_of
from .settings import Settings

BLOCK = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    file: str = "solution.py",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """For ``reward.custom_reward_function`` (path ``pkg://rlsandbox_verl.reward``, name ``compute_score``).

    The answer's last code block, else all of it, is written to *file* in a sandbox of the row's task, and
    the task's grader says what it is worth. What infrastructure breaks is tried again in a fresh sandbox;
    what stays broken is raised: verl then leaves that rollout out. It never counts as 0.

    Args:
        file: where the answer goes; relative to the task's workdir. options: those of the agent loop
        (``profile``, ``pool``, ``tasks``, ``retries``, ``claim_timeout`` ...).
    """
    settings = Settings.of(options or {})
    row = extra_info or {}
    if not row.get("task_id"):
        raise ConfigError(
            "a row has no extra_info.task_id", hint="write the data set with rlsandbox_verl.to_parquet"
        )
    job = job_of(settings)
    task = await job.task(str(row["task_id"]), row.get("task_source"))
    blocks = BLOCK.findall(solution_str)
    episode = rls.AsyncEpisode(await job.pool(), task, batch="verl-reward", retries=settings.retries)
    while True:
        sandbox = await episode.begin(timeout=settings.claim_timeout)
        try:
            code = blocks[-1] if blocks else solution_str
            # As bytes: what UTF-8 cannot say (a lone surrogate) is the model's mistake, not the caller's.
            await sandbox.write_file(file, code.encode(errors="replace"))
            outcome = await episode.grade()
            if outcome.reward is None or not math.isfinite(outcome.reward):
                raise ValueError(f"the grader's reward is {outcome.reward}, not a finite number")
        except Exception as error:
            await episode.broke(error, "grade")
            if episode.may_retry:
                continue
            await episode.fail()
            raise
        except BaseException:
            await episode.cancel("the trainer gave it up")
            raise
        await episode.complete()
        return {"score": float(outcome.reward), "acc": float(outcome.reward)}
