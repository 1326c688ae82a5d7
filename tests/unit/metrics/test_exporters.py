"""Exporters, scraped and received over real sockets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlsandbox.errors import ConfigError, PoolClosedError, UnsupportedError
from rlsandbox.metrics import (
    JsonLines,
    Metrics,
    TtfcSample,
    counters_table,
    export_otel,
    metrics_table,
    serve_prometheus,
    start_exporters,
)
from tests.support.small_disk import fill, small_disk
from tests.support.telemetry import Collector, key, scrape


def filled(run: str = "r1") -> Metrics:
    metrics = Metrics(run=run, gauges=lambda: {"ready": 3.0, "claimed": 2.0})
    metrics.record_ttfc(TtfcSample(queued_s=0.5, started_s=0.25))
    metrics.record_ttfc(TtfcSample(queued_s=30.0, never_started=True))
    metrics.reset.add(0.0012)
    metrics.count("claims", 2)
    metrics.failure("claim_timeout")
    return metrics


def test_prometheus_scrape() -> None:
    metrics = filled()
    with serve_prometheus(SimpleNamespace(metrics=metrics), port=0) as exporter:
        found = scrape(exporter.address)
        assert found[key("rlsandbox_ttfc_seconds_count", run="r1")] == 2
        assert found[key("rlsandbox_ttfc_seconds_sum", run="r1")] == 30.75
        assert found[key("rlsandbox_ttfc_seconds_bucket", run="r1", le="0.5")] == 0
        assert found[key("rlsandbox_ttfc_seconds_bucket", run="r1", le="1.0")] == 1
        assert found[key("rlsandbox_ttfc_seconds_bucket", run="r1", le="+Inf")] == 2
        assert found[key("rlsandbox_ttfc_exact_seconds", run="r1", statistic="p50")] == 0.75
        assert found[key("rlsandbox_ttfc_exact_seconds", run="r1", statistic="max")] == 30
        assert found[key("rlsandbox_ttfc_started_seconds_count", run="r1")] == 1
        assert found[key("rlsandbox_claims_total", run="r1")] == 2
        assert found[key("rlsandbox_never_started_total", run="r1")] == 1
        assert found[key("rlsandbox_failures_total", run="r1", kind="claim_timeout")] == 1
        assert found[key("rlsandbox_pool_ready", run="r1")] == 3
        assert not [name for name, _ in found if name.startswith("rlsandbox_verify_exact")]
        assert not [name for name, _ in found if "idle" in name and "ttfc" not in name]
        metrics.reset.add(5.0)
        with metrics.idle.blocked():
            pass
        again = scrape(exporter.address)
        assert again[key("rlsandbox_reset_seconds_count", run="r1")] == 2
        assert again[key("rlsandbox_reset_exact_seconds", run="r1", statistic="max")] == 5.0
        assert again[key("rlsandbox_accelerator_idle_seconds_total", run="r1")] > 0
        assert again[key("rlsandbox_ttfc_seconds_count", run="r1")] == 2
        port = exporter.port
    exporter.close()
    assert port is not None
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
        pass


def test_pools_of_one_process_share_a_port_and_leave_it_one_by_one() -> None:
    first, second = filled("r1"), filled("r2")
    one = serve_prometheus(first, port=0)
    assert one.port is not None
    two = serve_prometheus(second, port=one.port)
    again = serve_prometheus(first, port=one.port)  # a configured exporter and one in the script
    counts = {labels for name, labels in scrape(two.address) if name == "rlsandbox_claims_total"}
    assert counts == {frozenset({("run", "r1")}), frozenset({("run", "r2")})}
    again.close()
    assert key("rlsandbox_claims_total", run="r1") in scrape(two.address)
    one.close()
    assert key("rlsandbox_claims_total", run="r1") not in scrape(two.address)
    two.close()


def test_without_a_pool_every_pool_of_the_process_is_served() -> None:
    with serve_prometheus(port=0) as exporter:
        metrics = filled("made-later")
        assert scrape(exporter.address)[key("rlsandbox_claims_total", run="made-later")] == 2
        del metrics


def test_a_closed_pool_has_numbers_but_no_state() -> None:
    def closed() -> dict[str, float]:
        raise PoolClosedError("closed")

    metrics = filled()
    metrics.gauges = closed
    with serve_prometheus(metrics, port=0) as exporter:
        found = scrape(exporter.address)
    assert found[key("rlsandbox_claims_total", run="r1")] == 2
    assert not [name for name, _ in found if name.startswith("rlsandbox_pool_")]


def test_a_port_in_use_and_no_port_at_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            serve_prometheus(Metrics(), port=port)
    with pytest.raises(ConfigError, match="65535"):
        serve_prometheus(Metrics(), port=70000)
    with pytest.raises(ConfigError, match="pool is needed, not int"):
        serve_prometheus(3, port=0)
    for wrong in (-1, "9464", 1.5, True, None):
        with pytest.raises(ConfigError, match="a port lies between 0 and 65535, not "):
            serve_prometheus(Metrics(), port=wrong)  # type: ignore[arg-type]
    for host in (5, "", None):
        with pytest.raises(ConfigError, match="host must be a name or an address"):
            serve_prometheus(Metrics(), port=0, host=host)  # type: ignore[arg-type]
    for endpoint in (5, "", b"http://otel", "http://[::1", "http://otel:x"):
        with pytest.raises(ConfigError, match="export_otel: endpoint "):
            export_otel(Metrics(), endpoint=endpoint)  # type: ignore[arg-type]
    for period in (0, -1, float("nan"), "10", True):
        with pytest.raises(ConfigError, match="period_s must be a number of seconds above 0"):
            export_otel(Metrics(), endpoint="http://127.0.0.1:9", period_s=period)  # type: ignore[arg-type]


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'rlsandbox-pool\[prometheus\]'"):
        serve_prometheus(Metrics(), port=0)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'rlsandbox-pool\[otel\]'"):
        export_otel(Metrics(), endpoint="http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.metric_exporter", None)
    with pytest.raises(UnsupportedError, match=r"proto-grpc.*4318"):
        export_otel(Metrics(), endpoint="http://otel:4317")
    with pytest.raises(ConfigError, match="http or https URL"):
        export_otel(Metrics(), endpoint="otel:4318")


def test_nothing_optional_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, rlsandbox.metrics;"
        "print([m for m in sys.modules if m.split('.')[0] in"
        " ('prometheus_client', 'opentelemetry', 'matplotlib', 'rich', 'numpy', 'pynvml')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector() as made:
        yield made


def test_otel_pushes_the_same_numbers(collector: Collector) -> None:
    metrics = filled()
    with metrics.idle.blocked():
        pass
    endpoint = collector.endpoint
    with export_otel(metrics, endpoint=endpoint, period_s=3600) as exporter:
        assert exporter.address == endpoint + "/v1/metrics"
    assert collector.pushed.wait(30)
    run = ("run", "r1")
    assert collector.points["rlsandbox.events"][("event", "claims"), run] == 2
    assert collector.points["rlsandbox.failures"][("kind", "claim_timeout"), run] == 1
    assert collector.points["rlsandbox.ttfc"][run, ("statistic", "max")] == 30
    assert collector.points["rlsandbox.ttfc.count"][(run,)] == 2
    assert collector.points["rlsandbox.ttfc.sum"][(run,)] == 30.75
    assert collector.points["rlsandbox.pool"][("name", "ready"), run] == 3
    assert collector.points["rlsandbox.accelerator"][run, ("state", "idle")] > 0
    assert "rlsandbox.verify" not in collector.points


def test_exporters_from_settings(collector: Collector) -> None:
    assert start_exporters(Metrics()) == []
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    endpoint = collector.endpoint
    started = start_exporters(filled(), prometheus_port=free, otlp_endpoint=endpoint)
    assert key("rlsandbox_claims_total", run="r1") in scrape(started[0].address)
    for exporter in started:
        exporter.close()
    with pytest.raises(ConfigError):
        start_exporters(Metrics(), prometheus_port=free, otlp_endpoint="nowhere")
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", free)):
        pass


def test_json_lines(tmp_path: Path) -> None:
    metrics = filled()
    path = tmp_path / "numbers.jsonl"
    with JsonLines(metrics, path) as lines:
        metrics.count("claims", 5)
        metrics.reset.add(2.0)
        lines.write(step=1)
        lines.write(step=2)
    with JsonLines(metrics, path) as lines:
        metrics.failure("oom")
        lines.write(step=3)
    lines.close()
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["run"], first["step"], first["claims"], first["reset/max"]) == ("r1", 1, 5, 2.0)
    assert {name: n for name, n in second.items() if name not in ("time", "run", "step")} == {
        "claims": 0, "never_started": 0, "failures/claim_timeout": 0,
    }  # fmt: skip
    assert third["failures/oom"] == 1
    assert third["claims"] == 0
    with pytest.raises(ConfigError, match="closed"):
        lines.write()
    with pytest.raises(ConfigError, match="nowhere"):
        JsonLines(metrics, tmp_path / "nowhere" / "x.jsonl")
    with pytest.raises(ConfigError, match="not None"):
        JsonLines(None, path)


def test_json_lines_lose_no_number(tmp_path: Path) -> None:
    metrics = filled()
    with small_disk(tmp_path / "disk", "64k") as disk:
        with JsonLines(metrics, disk / "numbers.jsonl") as lines:
            metrics.count("claims", 5)
            with pytest.raises(ConfigError, match=r"a line of .*numbers\.jsonl cannot hold step: .*set"):
                lines.write(step={1})
            with pytest.raises(ConfigError, match="cannot hold loss"):
                lines.write(loss=float("nan"))
            assert lines.write(step=1)["claims"] == 5
            metrics.count("claims", 2)
            metrics.reset.add(2.0)
            filler = fill(disk)
            with pytest.raises(OSError, match="No space left") as caught:
                for _ in range(100):  # what is left of the file's last page
                    lines.write(step=2)
                    metrics.count("claims", 1)
            assert caught.value.filename == str(disk / "numbers.jsonl")
            metrics.count("claims", 3)
            filler.unlink()
            lines.write(step=3)
        told = [json.loads(line) for line in (disk / "numbers.jsonl").read_text().splitlines()]
    assert sum(line["claims"] for line in told) == metrics.counters()["claims"] - 2
    assert [line["step"] for line in told] == [1, *[2] * (len(told) - 2), 3]
    assert sum("reset/max" in line for line in told) == 1


def test_tables() -> None:
    console = Console(width=130, record=True, file=open("/dev/null", "w"))
    metrics = filled()
    with metrics.idle.busy():
        pass
    console.print(metrics_table(metrics, title="times"), counters_table(metrics))
    text = console.export_text()
    ttfc = next(line for line in text.splitlines() if "TTFC" in line)
    assert "750 ms" in ttfc
    assert ">=30 s" in ttfc
    assert "verify" not in text
    assert "failures/claim_timeout" in text
    assert "accelerator idle ratio" in text
    console.print(metrics_table(Metrics()), counters_table(None))
