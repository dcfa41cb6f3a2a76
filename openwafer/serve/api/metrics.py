"""Prometheus metrics, with the names that people already scrape."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from openwafer.serve.core import EngineStats

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class _EngineCollector(Collector):
    """Asks the engine when somebody asks us."""

    def __init__(self, stats: Callable[[], EngineStats], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "num_requests_running": ("requests being decoded", stats.num_running),
            "num_requests_waiting": ("requests in the queue", stats.num_waiting),
            "kv_cache_usage_perc": ("share of the KV cache in use, 0 to 1", stats.kv_cache_usage),
        }
        for name, (help_text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"openwafer:{name}", help_text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        counters = {
            "prompt_tokens": ("prompt tokens processed", stats.num_prompt_tokens),
            "generation_tokens": ("tokens generated", stats.num_generated_tokens),
            "prompt_tokens_cached": ("prompt tokens found in the prefix cache", stats.num_cached_tokens),
            "spec_decode_num_draft_tokens": ("tokens guessed ahead", stats.num_guessed_tokens),
            "spec_decode_num_accepted_tokens": ("guesses that were right", stats.num_right_tokens),
        }
        for name, (help_text, value) in counters.items():
            counter = CounterMetricFamily(f"openwafer:{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        if stats.stage_busy_s:
            busy = CounterMetricFamily(
                "openwafer:stage_busy_seconds", "seconds that a stage has computed", labels=["model_name", "stage"]
            )
            for stage, seconds in enumerate(stats.stage_busy_s, start=1):
                busy.add_metric([self._model, str(stage)], seconds)
            yield busy


class Metrics:
    """What the server counts itself; `watch` adds what the engine counts."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        success = Counter(
            "openwafer:request_success",
            "requests answered, by how they ended",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._success = {
            reason: success.labels(model, reason) for reason in ("stop", "length", "tool_calls", "cancelled", "error")
        }
        self.first_token_s = self._histogram("time_to_first_token_seconds", "from arrival to first token", _REQUEST_S)
        self.next_token_s = self._histogram("inter_token_latency_seconds", "between tokens", _LATENCY_S)
        self.request_s = self._histogram("e2e_request_latency_seconds", "from arrival to the end", _REQUEST_S)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"openwafer:{name}", help_text, ["model_name"], buckets=buckets, registry=self._registry)
        return family.labels(self._model)

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        self._registry.register(_EngineCollector(stats, self._model))

    def count(self, reason: str) -> None:
        self._success[reason].inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
