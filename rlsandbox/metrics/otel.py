"""OpenTelemetry exporter: the same numbers, pushed to a collector by OTLP.

Counters become observable counters; of each series its count and sum go out as counters, and its exact
statistics over the run as gauges (``statistic`` = mean, p50, p95, p99, max).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, UnsupportedError
from .core import Metrics, living
from .exporter import Exporter, metrics_of
from .series import STATISTICS

GRPC_PORT = 4317
HTTP_PORT = 4318
PUSH_S = 3
"""What a push may take, retries too: closing pushes once more, and waits no longer for a dead collector."""


def export_otel(pool: Any = None, *, endpoint: str | None = None, period_s: float = 10.0) -> Exporter:
    """Push a pool's numbers to an OpenTelemetry collector until the exporter is closed or the process ends.

    Args:
        pool: a Pool, an AsyncPool, or Metrics; None: those of every pool of this process.
        endpoint: the collector's URL; port 4317 speaks gRPC, every other one HTTP. Without one, the
            OTEL_EXPORTER_OTLP_* variables say where (by HTTP to this machine's port 4318).
        period_s: between two pushes; closing pushes once more.
    """
    metrics = metrics_of(pool)
    if isinstance(period_s, bool) or not isinstance(period_s, (int, float)) or not 0 < period_s < 1e9:
        raise ConfigError(f"export_otel: period_s must be a number of seconds above 0, not {period_s!r}")
    exporter, address = _otlp(endpoint)
    sdk = _module("opentelemetry.sdk.metrics", "opentelemetry-sdk")
    export = _module("opentelemetry.sdk.metrics.export", "opentelemetry-sdk")
    resources = _module("opentelemetry.sdk.resources", "opentelemetry-sdk")
    reader = export.PeriodicExportingMetricReader(exporter, export_interval_millis=period_s * 1000)
    provider = sdk.MeterProvider(
        metric_readers=[reader],
        resource=resources.Resource.create({"service.name": "rlsandbox"}),
        shutdown_on_exit=True,
    )
    _Instruments(provider.get_meter("rlsandbox"), lambda: living() if metrics is None else [metrics])
    return Exporter(provider.shutdown, address=address)


def _otlp(endpoint: str | None) -> tuple[Any, str]:
    """The exporter for an endpoint, and the address it pushes to."""
    if endpoint is None:
        http = _module("opentelemetry.exporter.otlp.proto.http.metric_exporter", "rlsandbox-pool[otel]")
        return http.OTLPMetricExporter(timeout=PUSH_S), "(from OTEL_EXPORTER_OTLP_* variables)"
    if not isinstance(endpoint, str):
        raise ConfigError(f"export_otel: endpoint must be an http or https URL, not {endpoint!r}")
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"export_otel: endpoint {endpoint!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"export_otel: endpoint must be an http or https URL, not {endpoint!r}")
    if port == GRPC_PORT:
        grpc = _module(
            "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
            "opentelemetry-exporter-otlp-proto-grpc",
            f"or name the collector's HTTP port, {HTTP_PORT}",
        )
        return grpc.OTLPMetricExporter(
            endpoint=endpoint, insecure=url.scheme == "http", timeout=PUSH_S
        ), endpoint
    http = _module("opentelemetry.exporter.otlp.proto.http.metric_exporter", "rlsandbox-pool[otel]")
    full = endpoint if url.path.strip("/") else endpoint.rstrip("/") + "/v1/metrics"
    return http.OTLPMetricExporter(endpoint=full, timeout=PUSH_S), full


def _module(name: str, package: str, other: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = f"pip install '{package}'" + (f", {other}" if other else "")
        raise UnsupportedError(
            f"export_otel needs {name}", kind="missing_extra", phase="config", hint=hint
        ) from error


class _Instruments:
    """Observable instruments; those of new counters and gauges are made when they first appear."""

    def __init__(self, meter: Any, sources: Callable[[], list[Metrics]]) -> None:
        self._meter = meter
        self._sources = sources
        self._observation = _module("opentelemetry.metrics", "opentelemetry-api").Observation
        self._known: set[str] = set()
        for name, series in Metrics().series().items():
            self._series(name, series.help)
        meter.create_observable_gauge(
            "rlsandbox.pool", [self._gauges], description="What is so now, by name."
        )
        self._counter("rlsandbox.events", self._events, "Events by name.")
        self._counter("rlsandbox.failures", self._failures, "Failures by kind.")
        self._counter("rlsandbox.accelerator", self._idle, "Seconds blocked, busy, idle.", "s")

    def _counter(self, name: str, read: Callable[[Any], Iterable[Any]], text: str, unit: str = "1") -> None:
        self._meter.create_observable_counter(name, [read], description=text, unit=unit)

    def _series(self, name: str, text: str) -> None:
        def each(read: Callable[[Any], Iterable[tuple[float, dict[str, str]]]]) -> Callable[[Any], list[Any]]:
            def observe(_: Any) -> list[Any]:
                return [
                    self._observation(value, {"run": metrics.run, **labels})
                    for metrics in self._sources()
                    for value, labels in read(metrics.series()[name])
                ]

            return observe

        def exact(series: Any) -> list[tuple[float, dict[str, str]]]:
            summary = series.summary()
            found = [(getattr(summary, statistic), {"statistic": statistic}) for statistic in STATISTICS]
            return [(value, labels) for value, labels in found if value is not None]

        self._counter(f"rlsandbox.{name}.count", each(lambda s: [(s.count, {})]), text)
        self._counter(f"rlsandbox.{name}.sum", each(lambda s: [(s.sum, {})]), text, "s")
        self._meter.create_observable_gauge(f"rlsandbox.{name}", [each(exact)], description=text, unit="s")

    def _events(self, _: Any) -> list[Any]:
        return [
            self._observation(n, {"run": metrics.run, "event": name})
            for metrics in self._sources()
            for name, n in metrics.counters().items()
            if not name.startswith("failures/")
        ]

    def _failures(self, _: Any) -> list[Any]:
        return [
            self._observation(n, {"run": metrics.run, "kind": name.removeprefix("failures/")})
            for metrics in self._sources()
            for name, n in metrics.counters().items()
            if name.startswith("failures/")
        ]

    def _idle(self, _: Any) -> list[Any]:
        found = []
        for metrics in self._sources():
            if metrics.idle.used:
                total = metrics.idle.total()
                for state in ("blocked", "busy", "idle"):
                    value = getattr(total, f"{state}_s")
                    found.append(self._observation(value, {"run": metrics.run, "state": state}))
        return found

    def _gauges(self, _: Any) -> list[Any]:
        return [
            self._observation(value, {"run": metrics.run, "name": name})
            for metrics in self._sources()
            for name, value in metrics.now().items()
        ]
