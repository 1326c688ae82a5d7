"""Prometheus exporter.

Promises: counters and histograms never go down, whoever else reads; exact percentiles stand beside the
histogram, because a histogram only knows its buckets. One server for each address of this process: pools
that name the same port share it.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ..errors import ConfigError, UnsupportedError
from .core import Metrics, living
from .exporter import Exporter, metrics_of
from .series import STATISTICS, Series, Summary

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500,
)  # fmt: skip
"""Upper bounds in seconds, from a reset (1 ms) to a cold cluster (minutes)."""

_servers: dict[tuple[str, int], _Server] = {}
_servers_lock = threading.Lock()


def serve_prometheus(pool: Any = None, *, port: int = 9464, host: str = "127.0.0.1") -> Exporter:
    """Serve a pool's numbers on ``http://host:port/metrics`` until the exporter is closed.

    Args:
        pool: a Pool, an AsyncPool, or Metrics; None: those of every pool of this process.
        port: 0 takes a free one; see ``exporter.port``.
        host: the address to listen on; the default answers this machine only.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "serve_prometheus needs prometheus-client",
            kind="missing_extra",
            phase="config",
            hint="pip install 'rlsandbox-pool[prometheus]'",
        ) from error
    metrics = metrics_of(pool)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"a port lies between 0 and 65535, not {port!r}")
    if not isinstance(host, str) or not host:
        raise ConfigError(f"host must be a name or an address to listen on, not {host!r}")
    with _servers_lock:
        server = _servers.get((host, port)) if port else None
        if server is None:
            server = _Server(host, port)
            _servers[host, server.port] = server
        server.collector.add(metrics)
        server.users += 1
    return Exporter(lambda: _leave(server, metrics), address=server.url, port=server.port)


def _leave(server: _Server, metrics: Metrics | None) -> None:
    with _servers_lock:
        server.collector.remove(metrics)
        server.users -= 1
        if server.users:
            return
        _servers.pop((server.host, server.port), None)
    server.stop()


class _Server:
    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.collector = Collector()
        self.users = 0
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self.collector)
        try:
            self._http, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve Prometheus metrics on {host}:{port}: {error.strerror or error}",
                hint="choose another port, or port=0 for a free one",
            ) from error
        except OverflowError as error:
            raise ConfigError(f"a port lies between 0 and 65535, not {port}") from error
        self.host = host
        self.port = int(self._http.server_port)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Histogram:
    """A series' samples since its beginning, by bucket; reads each sample once."""

    def __init__(self) -> None:
        self._mark = 0
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0
        self._summary = Summary(0)

    def read(self, series: Series) -> tuple[list[tuple[str, float]], float, Summary]:
        samples, mark = series._since(self._mark)
        for value in samples.values:
            self._counts[bisect.bisect_left(BUCKETS, value)] += 1
        self._sum += sum(samples.values)
        if mark != self._mark:
            self._summary = series.summary()
        self._mark = mark
        buckets, total = [], 0
        for bound, n in zip((*(str(float(b)) for b in BUCKETS), "+Inf"), self._counts, strict=True):
            total += n
            buckets.append((bound, float(total)))
        return buckets, self._sum, self._summary


class Collector:
    """Turns metrics into Prometheus families at each scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[Metrics | None] = []
        self._histograms: weakref.WeakKeyDictionary[Series, _Histogram] = weakref.WeakKeyDictionary()

    def add(self, metrics: Metrics | None) -> None:
        with self._lock:
            self._added.append(metrics)

    def remove(self, metrics: Metrics | None) -> None:
        with self._lock:
            self._added.remove(metrics)

    def _sources(self) -> list[Metrics]:
        if None in self._added:
            return living()
        return list(dict.fromkeys(m for m in self._added if m is not None))

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        with self._lock:  # scrapes run on threads of their own
            sources = self._sources()
            histograms: dict[str, Any] = {}
            exact: dict[str, Any] = {}
            counters: dict[str, Any] = {}
            gauges: dict[str, Any] = {}
            failures = CounterMetricFamily("rlsandbox_failures", "Failures by kind.", labels=["run", "kind"])
            for metrics in sources:
                for name, series in metrics.series().items():
                    buckets, total, summary = self._histograms.setdefault(series, _Histogram()).read(series)
                    base = f"rlsandbox_{name}_seconds"
                    histograms.setdefault(
                        name, HistogramMetricFamily(base, series.help, labels=["run"])
                    ).add_metric([metrics.run], buckets, sum_value=total)
                    if name.startswith("ttfc_"):  # the parts: their histograms are enough
                        continue
                    family = exact.setdefault(
                        name,
                        GaugeMetricFamily(
                            f"rlsandbox_{name}_exact_seconds",
                            f"{series.help} Exact over the run; claims that never started count as long as"
                            " they waited.",
                            labels=["run", "statistic"],
                        ),
                    )
                    for statistic in STATISTICS:
                        value = getattr(summary, statistic)
                        if value is not None:
                            family.add_metric([metrics.run, statistic], value)
                for name, n in metrics.counters().items():
                    kind = name.removeprefix("failures/")
                    if kind != name:
                        failures.add_metric([metrics.run, kind], n)
                    else:
                        counters.setdefault(
                            name,
                            CounterMetricFamily(
                                f"rlsandbox_{safe(name)}", f"Events called {name}.", labels=["run"]
                            ),
                        ).add_metric([metrics.run], n)
                if metrics.idle.used:
                    idle = metrics.idle.total()
                    for name, text, seconds in (
                        ("blocked", "The trainer waited for sandboxes.", idle.blocked_s),
                        ("accelerator_busy", "Generation or training was in progress.", idle.busy_s),
                        ("accelerator_idle", "Blocked on sandboxes and not busy.", idle.idle_s),
                    ):
                        counters.setdefault(
                            f"{name}_seconds",
                            CounterMetricFamily(f"rlsandbox_{name}_seconds", text, labels=["run"]),
                        ).add_metric([metrics.run], seconds)
                for name, value in metrics.now().items():
                    gauges.setdefault(
                        name,
                        GaugeMetricFamily(f"rlsandbox_pool_{safe(name)}", f"{name}, now.", labels=["run"]),
                    ).add_metric([metrics.run], value)
        yield from histograms.values()
        yield from exact.values()
        yield from counters.values()
        yield failures
        yield from gauges.values()

    def describe(self) -> list[Any]:
        return []


def safe(name: str) -> str:
    """*name* with what a metric's name may not hold turned into ``_``."""
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
