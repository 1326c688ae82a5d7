"""A check that a platform team runs in CI: the profile of the team's own file, exporters, a gate on coverage.

RLSANDBOX_CONFIG=rlsandbox.toml python platform_team.py eval
"""

import sys

import rlsandbox as rls


def main(profile: str | None = None) -> int:
    with rls.Pool(profile=profile) as pool:
        exporter = rls.metrics.serve_prometheus(
            pool, port=0
        )  # 0: any free port; rls.metrics.export_otel(pool) pushes
        print("metrics at", exporter.address)
        report = pool.run_rollouts(
            rls.load_tasks("demo", limit=4),
            lambda sandbox, task: sandbox.run("true", timeout=5).ok,
            group_size=2,
        )
        report.print()
        print("size", pool.size, "coverage", report.coverage)
    return 0 if report.coverage == 1.0 else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
