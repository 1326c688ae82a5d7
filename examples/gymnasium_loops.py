"""Gymnasium loops: one sandbox, a wrapper around one, and 32 at once. Needs no cluster."""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np

import rlsandbox as rls


class Last(gym.ObservationWrapper[Any, Any, Any]):
    """Ordinary wrappers work around a single environment."""

    def observation(self, observation: Any) -> Any:
        return observation["stdout"][-500:]


def observe(result: rls.CommandResult, task: rls.Task) -> str:
    return result.stdout[-500:] or task.prompt


def reward_fn(result: rls.CommandResult, sandbox: rls.Sandbox, outcome: rls.Outcome | None) -> float:
    return (outcome.reward or 0.0) if outcome else -0.01


def main(num_envs: int, steps: int) -> None:
    env = gym.make("Sandbox-v0")  # no argument: demo tasks, local backend
    obs, info = env.reset(seed=0)
    print(f"task {info['task_id']}: {obs['prompt'].splitlines()[0]}")
    obs, reward, terminated, truncated, info = env.step("ls")
    print(f"{obs['stdout']}reward {reward}, terminated {terminated}, truncated {truncated}")
    env.close()

    wrapped = Last(gym.make("Sandbox-v0", tasks=rls.load_tasks("demo")))
    wrapped.reset(seed=0)
    print(repr(wrapped.step("echo wrapped")[0]))
    wrapped.close()

    with rls.Pool(size=num_envs) as pool:
        envs = gym.make_vec(
            "Sandbox-v0",
            num_envs=num_envs,
            pool=pool,
            tasks=rls.load_tasks("demo"),
            observe=observe,
            reward_fn=reward_fn,
            max_episode_steps=10,
        )
        envs.reset(seed=0)
        total, ended, broken = 0.0, 0, 0
        for _ in range(steps):
            _, rewards, terminations, truncations, _ = envs.step(["ls"] * num_envs)
            ok = ~np.isnan(rewards)  # NaN: infrastructure failed; never a 0
            total += float(rewards[ok].sum())
            broken += int((~ok).sum())
            ended += int((terminations | truncations).sum())
        envs.close()
        print(
            f"{num_envs} environments, {steps} steps: {ended} episodes, {broken} broken, rewards {total:.2f}"
        )
        print(f"TTFC: {pool.metrics.ttfc.summary()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    main(given.num_envs, given.steps)
