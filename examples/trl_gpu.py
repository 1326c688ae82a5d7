"""On a GPU: the idle ratio beside the busy share that NVML measures, with a cold and with a warm pool.

    python examples/trl_gpu.py [--steps 6] [--batch 16]      # a few minutes

Same tiny model and tasks as trl_grpo.py, on the GPU. The idle ratio says which share of the time the trainer
waited for sandboxes with nothing to compute; NVML says which share a kernel ran. With a better pool the first
falls and the second rises. Without a GPU it says what is missing, and ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
import trl_grpo as example

from rlsandbox.metrics.device import DeviceBusy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: torch sees no GPU", file=sys.stderr)
        return 1
    rows = []
    for name in ("cold", "warm", "warm", "cold"):
        with DeviceBusy() as device:
            log = example.warm_or_cold(name, asked.steps, asked.batch, use_cpu=False)
            share = device.share()
        keys = {"idle ratio": "sandbox/idle_ratio", "TTFC": "sandbox/ttfc/mean", "step": "step_time"}
        row = {label: statistics.fmean(entry[key] for entry in log) for label, key in keys.items()}
        rows.append({"pool": name, **row, "busy": share, "why": device.why})
        busy = f"{share:.3f}" if share is not None else f"not measured ({device.why})"
        idle, step = row["idle ratio"], row["step"]
        print(f"{name:6} idle ratio {idle:.3f}  NVML busy {busy}  step {step:.2f} s", flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
