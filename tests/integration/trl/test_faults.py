"""What breaks while the real trainer trains: kills by pid, a full disk, residue, claims that time out."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra trl is not installed")

from rlsandbox_trl import SandboxEnvironment, SandboxTraining
from transformers import TrainerCallback

import rlsandbox as rls
from rlsandbox.ledger import reading
from rlsandbox.ledger.report import Report
from tests.support.keepers import keeper_of, leaving_out
from tests.support.small_disk import fill, small_disk

NAPS = itertools.count(73_000)


class Fragile(SandboxEnvironment):
    """Its tool does something to the keeper of the n-th call's sandbox."""

    calls = itertools.count()
    at: frozenset[int] = frozenset()
    number: signal.Signals | None = signal.SIGKILL
    stopped: list[int] = []  # noqa: RUF012

    def write(self, path: str, content: str) -> str:
        """Write.

        Args:
            path: The file.
            content: The text.

        Returns:
            str: A confirmation.
        """
        hit = next(self.calls) in self.at
        if hit and self.number is None:
            raise ValueError("no")
        if hit:
            nap = f"sleep {next(NAPS)}"
            held = self._rollout.episode.sandbox  # type: ignore[union-attr]
            held.run(f"{nap} >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done")
            keeper = keeper_of(nap)
            os.kill(keeper, self.number)  # type: ignore[arg-type]
            self.stopped.append(keeper)
        self._sandbox.write_file(path, content)
        return "written"

    write_file = None  # type: ignore[assignment]


@pytest.fixture
def fragile(example: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A SandboxTraining whose model calls ``write``, of which some hit their sandbox's keeper."""
    plain = example.Bytes.parse_response

    def parse(self: Any, ids: Any, **kwargs: Any) -> Any:
        message = plain(self, ids, **kwargs)
        message["tool_calls"][0]["function"]["name"] = "write"
        return message

    monkeypatch.setattr(example.Bytes, "parse_response", parse)
    stopped: list[int] = []

    def make(*at: int, number: signal.Signals | None = signal.SIGKILL, **options: Any) -> SandboxTraining:
        values = {"calls": itertools.count(), "at": frozenset(at), "number": number, "stopped": stopped}
        kind = type("Fragile", (Fragile,), {"__doc__": Fragile.__doc__, **values})
        return SandboxTraining(example.tasks(4), tools=[], environment=kind, **{"size": 4, **options})

    yield make
    for pid in stopped:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


def rewards_of(trainer: Any) -> list[Any]:
    """Every batch's rewards, as the trainer computes with them."""
    seen: list[Any] = []
    original = trainer._calculate_rewards

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(original(*args, **kwargs))
        return seen[-1]

    trainer._calculate_rewards = watched
    return seen


def logs(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def test_a_sandbox_that_dies_in_a_tool_is_replaced_within_the_step(fragile: Any, make_trainer: Any) -> None:
    sandboxes = fragile(1, step_timeout=120.0)
    trainer = make_trainer(sandboxes)
    seen = rewards_of(trainer)
    trainer.train()
    assert [int(batch.isnan().sum()) for batch in seen] == [0, 0]
    first, _ = logs(trainer)
    assert first["sandbox/coverage"] == 1.0 and first["sandbox/failures/sandbox_died"] == 1
    report = sandboxes._pool.report()
    assert sorted(len(log.attempts) for log in report.logs) == [1] * 7 + [2]


def test_a_stopped_keeper_holds_the_step_no_longer_than_its_deadline(fragile: Any, make_trainer: Any) -> None:
    sandboxes = fragile(1, number=signal.SIGSTOP, step_timeout=8.0)
    trainer = make_trainer(sandboxes)
    seen = rewards_of(trainer)
    trainer.train()
    assert [int(batch.isnan().sum()) for batch in seen] == [1, 0]
    (broken,) = [r for r in sandboxes._pool.report().records if r.status != "completed"]
    assert broken.failure is not None and broken.failure.kind == "step_timeout"


class During(TrainerCallback):  # type: ignore[misc]
    """Something to do at the beginnings and ends of steps."""

    def __init__(self, begin: Callable[[int], None], end: Callable[[int], None] = lambda n: None) -> None:
        self.begin, self.end = begin, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end(state.global_step)


def test_when_all_claims_of_a_step_time_out_it_is_skipped_and_training_goes_on(
    example: Any, make_trainer: Any
) -> None:
    pool = rls.Pool(size=4, max_size=4)
    held: list[rls.Sandbox] = []
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], pool=pool, claim_timeout=2.0)
    trainer = make_trainer(sandboxes, max_steps=3)
    seen = rewards_of(trainer)
    weights: list[Any] = []

    def end(step: int) -> None:
        weights.append(copy.deepcopy(list(trainer.model.parameters())))
        if step == 1:  # the step after this one finds nothing
            held.extend(pool.claim(rls.Task(id="other")) for _ in range(4))
        while step == 2 and held:
            held.pop().release()

    trainer.add_callback(During(lambda n: None, end))
    with pool:
        trainer.train()
        assert not pool.closed  # it was given: closing it is its maker's business
    assert [int(batch.isnan().sum()) for batch in seen] == [0, 4, 0]
    skipped = logs(trainer)[1]
    assert skipped["sandbox/coverage"] == 0.0 and skipped["sandbox/groups_skipped"] == 2
    assert skipped["sandbox/failures/claim_timeout"] >= 4
    assert skipped["sandbox/reward_bound_low"] == 0 and skipped["sandbox/reward_bound_high"] == 1
    assert skipped["grad_norm"] == 0.0
    assert [entry["sandbox/coverage"] for entry in logs(trainer)] == [1.0, 0.0, 1.0]
    failed = [r for r in pool.report().records if r.failure is not None]
    assert len(failed) == 4 and {r.failure.kind for r in failed if r.failure} == {"claim_timeout"}


class Looking(SandboxEnvironment):
    """Its tool tells what lay there before, and who looked."""

    seen: list[tuple[str, str]] = []  # noqa: RUF012

    def write_file(self, path: str, content: str) -> str:
        """Write.

        Args:
            path: The file.
            content: The text.

        Returns:
            str: A confirmation.
        """
        self.seen.append((self._sandbox.id, self._sandbox.run("cat answer.txt 2>/dev/null").text))
        self._sandbox.write_file(path, content or "-")
        return "written"


def test_a_reset_that_leaves_something_costs_the_sandbox_and_no_rollout(
    example: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A keeper whose resets leave the files where they are: verification finds them, each time."""
    keeper = leaving_out("upper", tmp_path)
    monkeypatch.setattr("rlsandbox.backends.local.hubs.keeper_binary", lambda: keeper)
    monkeypatch.setattr(Looking, "seen", [])
    # Without a layer: this keeper could not seal one.
    tasks = [dataclasses.replace(task, workdir=None) for task in example.tasks(4)]
    sandboxes = SandboxTraining(tasks, environment=Looking, tools=[], size=4)
    trainer = make_trainer(sandboxes, max_steps=3)
    residue: list[str] = []
    trainer.add_callback(During(lambda n: residue.extend(sandboxes.pool.stats().residue)))
    seen = rewards_of(trainer)
    trainer.train()
    assert not any(batch.isnan().any() for batch in seen)
    steps = logs(trainer)
    assert [entry["sandbox/coverage"] for entry in steps] == [1.0] * 3
    assert sum(entry["sandbox/quarantined"] for entry in steps) >= 4  # those of the last step may come later
    assert all(entry["sandbox/recycled"] == 0 for entry in steps)
    assert any("answer.txt" in what for what in residue), residue
    used = [sandbox for sandbox, _ in Looking.seen]
    assert len(used) == len(set(used)) == 12, "a sandbox in which something was left was used again"
    assert {before for _, before in Looking.seen} == {""}
    assert sandboxes._pool is not None and sandboxes._pool.report().completed == 12


def test_a_tool_that_raises_is_that_rollouts_own_affair(fragile: Any, make_trainer: Any) -> None:
    sandboxes = fragile(1, number=None)
    trainer = make_trainer(sandboxes)
    seen = rewards_of(trainer)
    trainer.train()
    assert not any(batch.isnan().any() for batch in seen)  # it is scored for what it did: nothing
    assert sandboxes._pool.report().completed == 8


class Raising(SandboxEnvironment):
    def get_reward(self) -> float | None:
        raise RuntimeError("a mistake in get_reward")


def test_a_reward_that_raises_ends_the_training_and_leaves_nothing(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], environment=Raising, size=4)
    trainer = make_trainer(sandboxes)
    pool = sandboxes.pool
    with pytest.raises(RuntimeError, match="a mistake in get_reward"):
        trainer.train()
    assert pool.closed
    assert all(log.record is not None for log in pool.report().logs)


class Own(SandboxEnvironment):
    def get_reward(self) -> float | None:
        return len(self._sandbox.read_file("answer.txt")) / 12


def test_a_reward_of_ones_own_is_recorded_as_completed(example: Any, make_trainer: Any) -> None:
    sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], environment=Own, size=4)
    trainer = make_trainer(sandboxes, max_steps=1)
    trainer.train()
    (entry,) = logs(trainer)
    assert entry["sandbox/coverage"] == 1.0
    report = sandboxes._pool.report()
    assert report.completed == 4 and report.mean_reward == pytest.approx(entry["reward"], abs=1e-4)


def test_a_ledger_on_a_full_disk_does_not_stop_the_training(
    example: Any, make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", "16m") as disk:
        pool = rls.Pool(size=4, ledger=disk / "run.db")
        sandboxes = SandboxTraining(example.tasks(4), tools=["write_file"], pool=pool)
        trainer = make_trainer(sandboxes, max_steps=3)

        def begin(step: int) -> None:
            if step == 1:
                fill(disk)
            elif step == 2:
                (disk / "filler").unlink()

        trainer.add_callback(During(begin))
        with pool:
            trainer.train()
        assert len(logs(trainer)) == 3
        assert [entry["sandbox/coverage"] for entry in logs(trainer)] == [1.0] * 3
        book = Report.of(reading.read([disk / "run.db"]))  # what was kept in memory came later
        assert book.requested == 12 and all(log.record is not None for log in book.logs)


@pytest.mark.parametrize("loss", ["dapo", "bnpo", "grpo"])
def test_a_broken_rollout_has_no_part_in_the_gradient(fragile: Any, make_trainer: Any, loss: str) -> None:
    """The gradient with a broken rollout is that of the same batch without it; KL term included.

    Another reward function, which has something to say about every rollout, is there too.
    """
    import torch

    sandboxes = fragile(2, retries=0)
    trainer = make_trainer(
        sandboxes, loss_type=loss, num_generations=4, per_device_train_batch_size=4,
        reward_funcs=[lambda completions, **_: [float(len(str(c))) for c in completions]],
    )  # fmt: skip
    trainer.beta, trainer.ref_model = 0.3, copy.deepcopy(trainer.model)
    with torch.no_grad():  # somewhere else than the reference, so that the KL term pulls
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[0]] * 4
    try:
        batch = trainer._generate_and_score_completions(rows)
    finally:
        sandboxes.pool.close()
    gone = [environment._missing for environment in trainer.environments]
    assert sum(gone) == 1
    assert batch["advantages"][gone.index(True)] == 0

    def gradient(part: dict[str, Any]) -> Any:
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, part).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    stay = torch.tensor([not flag for flag in gone])
    without = {key: value[stay] if value.dim() else value for key, value in batch.items()}
    mask = without["completion_mask"] * without["tool_mask"]
    without["num_items_in_batch"] = mask.sum()
    got, want = gradient(batch), gradient(without)
    if loss == "grpo":  # a mean over all rollouts of the batch: the same direction, 3 of 4 in length
        want = want * 3 / 4
    assert want.norm() > 0
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-7)
    # And of the rewards: the baseline is that of the three.
    kept = batch["advantages"][stay]
    assert kept.sum().abs() < 1e-4
