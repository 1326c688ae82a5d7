"""One ray with verl's real agent loop workers (four), its queue, its replay buffer; real local sandboxes.

The model server is a double that does what prompts say. All of it is started once: verl takes seconds to import.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))  # not as tests.support: verl's own wheel brings a package called tests


RAYS = {
    "RAY_AUTH_MODE": "disabled",  # else ray leaves a token in the user's home
    "RAY_worker_niceness": "0",  # it is 15 otherwise: on a busy machine nothing moves
    "RAY_memory_monitor_refresh_ms": "0",  # else it kills workers for the memory that others use
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture(scope="session")
def verl() -> Any:
    return pytest.importorskip("verl", reason="verl is not installed")


@pytest.fixture(scope="session")
def rig(verl: Any) -> Any:
    import verl_rig

    return verl_rig


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts a script with a home of its own."""
    import verl_runs

    from rlsandbox import _paths

    begun: list[subprocess.Popen[str]] = []

    def run(script: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
        env = {
            **os.environ, "RLSANDBOX_HOME": str(tmp_path / "home"), "RLSANDBOX_CACHE": str(_paths.cache()),
            "VERL_FILE_LOGGER_PATH": str(tmp_path / "log.jsonl"), **RAYS,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(SUPPORT)]), **more,  # ray's workers as well
        }  # fmt: skip
        env.pop("RAY_ADDRESS", None)
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), *arguments],
                cwd=tmp_path, env=env, stdout=out, stderr=out, text=True,
            )  # fmt: skip
        begun.append(process)
        return process

    yield run
    for process in begun:
        process.kill()
        process.wait()
    for pid in verl_runs.of(tmp_path / "home"):  # of a test that has failed
        os.kill(int(pid), signal.SIGKILL)


VICTIM = "test $(( @i % 4 )) != 0 || sleep 87654; echo @i > out"
ONCE = "test @i != 0 || sleep 87654; echo @i > out"
EVEN = "test $(( $(cat out) % 2 )) = 0"
PLANS: dict[str, Any] = {
    "plain": [("shell", {"command": "echo @i > out"}), ("read_file", {"path": "out"}), ("submit", {})],
    "plain-2": [("write_file", {"path": "out", "content": "@i"})],
    "victim": [("shell", {"command": VICTIM})],
    "once": [("shell", {"command": ONCE})],
    "lone": [("shell", {"command": "test @i = 1 || sleep 87654; echo @i > out"})],
    "raises": [("RAISE", {"who": [2]})],
    "all-raise": [("RAISE", {"who": [0, 1, 2, 3]})],
    "asleep": [("shell", {"command": "sleep 87653"})],
    "garbage": [
        ("shell", {"command": "echo \0"}),
        ("write_file", {"path": "out\ud800", "content": "2"}),
        ("write_file", {"path": "out", "content": "\udfff"}),
        ("read_file", {"path": ""}),
        ("shell", {"cmd": "ls"}),
        ("nonsense", {}),
        ("shell", {"command": "echo 2 > out"}),
    ],
    "cheat": [
        ("shell", {"command": "ls -a; cat check 2>&1"}),
        ("submit", {}),
        ("shell", {"command": "date"}),
    ],
}


@pytest.fixture(scope="session")
def place(rig: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("verl")
    rig.example().make_model(where / "model")
    tasks = [
        {"id": name, "prompt": rig.plan(*calls), "workdir": "/work",
         "grader": {"command": EVEN, "files": {"check": "hidden"}}}
        for name, calls in PLANS.items()
    ]  # fmt: skip
    (where / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return where


@pytest.fixture(scope="session")
def cluster(verl: Any, place: Path) -> Iterator[None]:
    import ray

    from rlsandbox import _paths

    os.environ.update(RAYS)
    os.environ.pop("RAY_ADDRESS", None)  # another cluster
    env = {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "RLSANDBOX_HOME": str(place / "home"),
        "RLSANDBOX_CACHE": str(_paths.cache()),
        "PYTHONWARNINGS": "ignore",
    }
    # Actors are promised CPUs for good: the numbers are ray's own book-keeping, not the machine's.
    for tries_left in (2, 1, 0):
        try:
            ray.init(
                num_cpus=24, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
                logging_level="error", runtime_env={"env_vars": env},
            )  # fmt: skip
            break
        except Exception as error:  # its parts have 30 s to start, whatever else the machine does
            ray.shutdown()
            if not tries_left:
                raise
            print("ray did not start:", error)
    yield
    ray.shutdown()


class Training:
    """What of verl's v1 trainer makes batches, without models: real queue, workers and replay buffer."""

    def __init__(self, config: Any, manager: Any, place: Path) -> None:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        class Bare(PPOTrainer):
            def on_step_end(self) -> None: ...
            def on_sample_end(self) -> None: ...

        self.config, self.manager, self.place, self.plans = config, manager, place, PLANS
        self.trainer = Bare(config)
        self.trainer.agent_loop_manager = manager
        self.buffer = self.trainer.replay_buffer
        self.buffer.poll_interval = 0.05
        self.buffer.refill_fn = self.refill
        self.refills: list[int] = []
        self.steps = itertools.count(1)
        self.step = 0
        self.refill_with = "plain"

    def submit(self, *names: str, validate: bool = False, loop: str = "sandboxes") -> list[str]:
        import transfer_queue as tq
        import verl_rig
        from verl.utils import tensordict_utils as tu

        self.step = next(self.steps)
        uids = [f"{name}.{self.step}.{i}" for i, name in enumerate(names)]
        prompts = [[{"role": "user", "content": verl_rig.plan(*PLANS[name])}] for name in names]
        rows = [{"task_id": name, "task_source": str(self.place / "tasks.jsonl")} for name in names]
        batch = tu.get_tensordict(
            {
                "raw_prompt": verl_rig.column(prompts), "extra_info": verl_rig.column(rows),
                "agent_name": verl_rig.column([loop] * len(names)), "uid": verl_rig.column(uids),
                "index": verl_rig.column(list(range(len(names)))),
            }
        )  # fmt: skip
        tu.assign_non_tensor_data(batch, "global_steps", self.step)
        if validate:
            tu.assign_non_tensor_data(batch, "validate", True)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.step} for _ in names]
        tq.kv_batch_put(keys=uids, partition_id="val" if validate else "train", tags=tags)
        self.manager.generate_sequences(batch)
        return uids

    def refill(self, n: int) -> int:
        self.refills.append(n)
        self.submit(*[self.refill_with] * n)
        return n

    def sample(self, n: int, partition: str = "train") -> Any:
        batch, _ = self.buffer.sample(global_steps=self.step, partition_id=partition, batch_size=n)
        return batch

    def rows(self, batch: Any, *fields: str) -> Any:
        import transfer_queue as tq

        found = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        return found


@pytest.fixture(scope="session")
def training(rig: Any, cluster: None, place: Path) -> Iterator[Training]:
    import transfer_queue as tq
    from rlsandbox_verl import hooks
    from verl.utils.import_utils import load_class_from_fqn

    loops = place / "loops.yaml"
    loops.write_text(
        "- name: sandboxes\n  _target_: rlsandbox_verl.SandboxAgentLoop\n"
        "  pool: {size: 4, max_size: 8, config: false, run: job}\n  retries: 1\n  claim_timeout: 20\n  give_up: 3\n"
        "- name: whole\n  _target_: rlsandbox_verl.SandboxAgentLoop\n  on_failure: skip_group\n  retries: 0\n"
    )
    config = rig.config(
        place / "model", loops,
        **{
            "transfer_queue.enable": True, "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            "data.train_batch_size": 2, "actor_rollout_ref.rollout.agent.num_workers": 4,
        },
    )  # fmt: skip
    tq.init(config.transfer_queue)
    manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
    made = manager.create(
        config=config, llm_client=rig.Obedient(place / "model"), teacher_client=None,
        reward_loop_worker_handles=None,
    )  # fmt: skip
    yield Training(config, made, place)
    hooks.close()
    tq.close()


@pytest.fixture
def job(training: Training) -> Iterator[Training]:
    """The training, with nothing left over of the test before."""
    from rlsandbox_verl import hooks

    print("before:", hooks.numbers())
    training.refills.clear()
    training.refill_with = "plain"
    yield training
    print("after:", hooks.numbers())
