"""How much has to travel before 18,312 rollouts of 4,578 images can begin: a plan without a cluster.

python examples/plan_images.py --images 4578 --nodes 64
"""

from __future__ import annotations

import argparse
import random
import time

from rlsandbox.images import Demand, Image, Inventory, Layer, Node, plan_images

MIB, GIB = 1 << 20, 1 << 30


def catalog(count: int, seed: int = 1) -> dict[str, Image]:
    """Images as benchmarks of repositories have them: few bases, a layer a repository, a small one a task."""
    rng = random.Random(seed)
    bases = [Layer(f"sha256:base{n}", rng.randrange(50 * MIB, 300 * MIB)) for n in range(5)]
    repositories = [Layer(f"sha256:repo{n}", rng.randrange(100 * MIB, 800 * MIB)) for n in range(120)]
    made = {}
    for number in range(count):
        which = rng.randrange(len(repositories))
        own = Layer(f"sha256:task{number}", rng.randrange(MIB, 60 * MIB))
        name = f"registry.example/task/{number}:1"
        made[name] = Image(name, (bases[which % len(bases)], repositories[which], own))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=4578)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=64)
    args = parser.parse_args()
    images = catalog(args.images)
    demand = [Demand(name, args.group_size, args.group_size) for name in images]
    nodes = Inventory(tuple(Node(f"node-{n}", room=500 * GIB, sandboxes=256) for n in range(args.nodes)))
    began = time.perf_counter()
    plan = plan_images(demand, images, nodes)
    took = time.perf_counter() - began
    print(f"{plan.images:,} images, {plan.rollouts:,} rollouts, {args.nodes} nodes: planned in {took:.1f} s")
    print(f"if nothing were shared  {plan.image_bytes / 1e9:8.0f} GB")
    print(f"different layers        {plan.unique_bytes / 1e9:8.0f} GB")
    print(f"to move                 {plan.bytes / 1e9:8.0f} GB")
    print(f"fullest node            {max(use.working_set for use in plan.nodes) / 1e9:8.0f} GB on disk")
    for note in plan.notes:
        print(note)


if __name__ == "__main__":
    main()
