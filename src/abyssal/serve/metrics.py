"""What `/metrics` shows. Numbers of the engine are read when scraped, from the latest snapshot that it sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from abyssal.engine.engine import EngineStats
from abyssal.errors import RequestError
from abyssal.serve.errors import HttpError
from abyssal.serve.streams import ClientLeft

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds
_NEXT_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class RequestRecord:
    """One HTTP request while it runs. `outcome`: completed, aborted, failed or rejected."""

    def __init__(self) -> None:
        self.outcome = "completed"


class TokenClock:
    """Times the tokens of one sequence."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._last, self._begun = metrics, time.monotonic(), False

    def tick(self, count: int) -> None:
        """`count` tokens arrived together."""
        if not count:
            return
        now = time.monotonic()
        if self._begun:
            for _ in range(count):
                self._metrics.next_token.observe((now - self._last) / count)
        else:
            self._metrics.first_token.observe(now - self._last)
        self._last, self._begun = now, True


class Metrics:
    """One server's metrics, in a registry of their own.

    Args:
        stats: the engine's latest snapshot.
        alive: whether the engine lives.
    """

    def __init__(self, stats: Callable[[], EngineStats], alive: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "abyssal_requests",
            "HTTP requests for generation that ended, by outcome",
            ["route", "outcome"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "abyssal_request_seconds",
            "Duration of HTTP requests for generation",
            ["route"],
            buckets=_WHOLE,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "abyssal_time_to_first_token_seconds",
            "From sequence to its first token",
            buckets=_FIRST_TOKEN,
            registry=self.registry,
        )
        self.next_token = Histogram(
            "abyssal_inter_token_seconds", "From one token of a sequence to the next", buckets=_NEXT_TOKEN, registry=self.registry
        )
        self.registry.register(_EngineCollector(stats, alive))

    @contextmanager
    def request(self, route: str) -> Iterator[RequestRecord]:
        """Count one request of `route` and its outcome, which an exception decides unless the record says otherwise."""
        record, start = RequestRecord(), time.monotonic()
        try:
            yield record
        except BaseException as error:
            record.outcome = _outcome(error)
            raise
        finally:
            self._requests.labels(route, record.outcome).inc()
            self._seconds.labels(route).observe(time.monotonic() - start)

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _outcome(error: BaseException) -> str:
    if isinstance(error, ClientLeft | asyncio.CancelledError | GeneratorExit):
        return "aborted"
    is_clients = isinstance(error, RequestError) or (isinstance(error, HttpError) and error.status < 500)
    return "rejected" if is_clients else "failed"


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], alive: Callable[[], bool]) -> None:
        self._stats, self._alive = stats, alive

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("abyssal_engine_up", "1 while the engine lives", float(self._alive()))
        yield GaugeMetricFamily("abyssal_sequences_running", "Sequences being computed", stats.num_running)
        yield GaugeMetricFamily("abyssal_sequences_waiting", "Sequences in the queue", stats.num_waiting)
        yield CounterMetricFamily("abyssal_preemptions", "Sequences that gave up their pages", stats.num_preemptions)
        yield CounterMetricFamily("abyssal_preemptions_swapped", "Of these, copied to the host and back", stats.num_swapped)
        yield CounterMetricFamily("abyssal_engine_steps", "Batches computed", stats.num_steps)
        yield CounterMetricFamily("abyssal_prompt_tokens", "Prompt tokens computed, recomputation included", stats.prompt_tokens)
        yield CounterMetricFamily(
            "abyssal_cached_prompt_tokens", "Prompt tokens taken from the prefix cache", stats.cached_tokens
        )
        yield CounterMetricFamily("abyssal_generation_tokens", "Tokens generated", stats.generation_tokens)
        yield _labelled("abyssal_cache_pages_total", "Cache pages that exist", "bucket", stats.pages_total)
        yield _labelled("abyssal_cache_pages_free", "Cache pages not in use", "bucket", stats.pages_free)
        yield _labelled("abyssal_cache_pages_reusable", "Free cache pages that hold known prefixes", "bucket", stats.pages_cached)
        yield _labelled("abyssal_cache_page_bytes", "Size of one cache page", "bucket", stats.page_bytes)
        sizes = {bucket: count * stats.page_bytes[bucket] for bucket, count in stats.pages_total.items()}
        yield _labelled("abyssal_cache_bytes_total", "Bytes of all cache pages", "bucket", sizes)
        yield _labelled("abyssal_cache_pages_used", "Cache pages in use", "kind", stats.pages_by_kind)
        yield _labelled("abyssal_cache_bytes_used", "Bytes of cache pages in use", "kind", stats.bytes_by_kind)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
