"""Exporters that a pool starts because its configuration says so."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox._paths import cache
from tests.support.telemetry import Collector, key, scrape


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def test_a_configured_pool_exports_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("RLSANDBOX_CACHE", str(cache()))
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path))
    port = free_port()
    with Collector() as collector:
        config = tmp_path / "rlsandbox.toml"
        config.write_text(
            f"[pool]\nsize = 2\n[profiles.eval.pool]\nsize = 3\n"
            f'[metrics]\nprometheus_port = {port}\notlp_endpoint = "{collector.endpoint}"\n'
        )
        with rls.Pool("local", config=config, profile="eval") as pool:
            assert pool.size == 3
            again = rls.metrics.serve_prometheus(pool, port=port)  # a script that asks for it, too
            tasks = [rls.Task(id=f"t{i}") for i in range(4)]
            report = pool.run_rollouts(
                tasks, lambda sandbox, task: sandbox.run("true").exit_code, group_size=2
            )
            assert report.coverage == 1.0
            page = scrape(f"http://127.0.0.1:{port}/metrics")
            assert page[key("rlsandbox_claims_total", run=pool.run)] == 8
            assert page[key("rlsandbox_ttfc_seconds_count", run=pool.run)] == 8
            assert page[key("rlsandbox_batch_seconds_count", run=pool.run)] == 1
            assert page[key("rlsandbox_pool_max_size", run=pool.run)] == 3
        again.close()
        run = ("run", pool.run)
        assert collector.points["rlsandbox.events"][("event", "claims"), run] == 8
        assert collector.points["rlsandbox.ttfc.count"][(run,)] == 8
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
        pass


def test_a_process_that_leaves_its_exporters_open_ends_all_the_same(tmp_path: Path) -> None:
    code = (
        "import rlsandbox as rls\n"
        "with rls.Pool('local', size=1, config=False) as pool:\n"
        "    exporter = rls.metrics.serve_prometheus(pool, port=0)\n"
        "    with pool.claim(rls.Task(id='t')) as sandbox:\n"
        "        sandbox.run('true')\n"
        "print(pool.metrics.ttfc.summary().n)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "RLSANDBOX_CACHE": str(cache()), "RLSANDBOX_HOME": str(tmp_path),
             "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
