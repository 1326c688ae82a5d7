"""The verl example as a user changes it: run by tests in processes of its own.

    verl_script.py PLACE STEPS [word ...] [name=value of verl's configuration ...]

Words: ``colocated`` is verl's asynchronous trainer in place of the synchronous one; ``bare`` has tasks without a
layer; ``full=DIRECTORY`` has the ledger there and no room for it during the second step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

import ray
import small_disk
import torch
import verl_grpo as example
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync


class Kept(example.OnCPU):
    """Saves and loads verl's own checkpoints; of its workers there is the policy alone."""

    disk: Path | None = None

    def _setup(self) -> None:
        super()._setup()
        self.actor_rollout_wg = SimpleNamespace(save_checkpoint=self._save, load_checkpoint=self._load)
        self.checkpoint_manager = SimpleNamespace(
            update_weights=lambda step: None,
            resume_generation_replicas=lambda: None,
            abort_replicas=lambda: None,
            sleep_replicas=lambda: None,
        )
        self._load_checkpoint()

    def _save(self, place: str, *rest: Any, **options: Any) -> None:
        os.makedirs(place, exist_ok=True)
        torch.save(self.logits, Path(place) / "logits")

    def _load(self, local_path: str, **options: Any) -> None:
        self.logits.data = torch.load(Path(local_path) / "logits").data
        ray.get(self._server.load.remote(self.logits.detach()))

    def on_step_begin(self) -> None:
        super().on_step_begin()
        if self.disk is not None and self.global_steps == 2:
            small_disk.fill(self.disk)
        elif self.disk is not None and self.global_steps == 3:
            (self.disk / "filler").unlink()


class Sync(Kept, example.PPOTrainerSync):
    """verl's synchronous trainer."""


class Colocated(Kept, PPOTrainerColocateAsync):
    """verl's asynchronous trainer whose model server shares the accelerators."""


def main() -> None:
    place, steps, *rest = sys.argv[1:]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    full = options.pop("full", None)
    kind: Any = Colocated if "colocated" in rest else Sync
    loops = example.LOOPS.replace(
        "{size: 16}", f"{{size: 16, run: verl{f', ledger: {full}/run.db' if full else ''}}}"
    )
    kind.disk = Path(full) if full else None
    where = Path(place)
    where.mkdir(exist_ok=True)
    given = {
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": where / "checkpoints",
        "trainer.v1.trainer_mode": "colocate_async" if "colocated" in rest else "sync",
        **options,
    }
    example.train(where, kind, loops, example.tasks(workdir=None) if "bare" in rest else (), **given)


if __name__ == "__main__":
    main()
