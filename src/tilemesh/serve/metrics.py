"""What a server counts and times, for Prometheus: one registry per server, so that several live in one process."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tilemesh.serve.answers import EngineStatus

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ServerMetrics:
    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._registry = registry = CollectorRegistry()
        self._status = status
        self.requests = Counter(
            "tilemesh_requests", "Bodies answered, by status code", ["path", "code"], registry=registry
        )
        self.prompt_tokens = Counter("tilemesh_prompt_tokens", "Tokens of prompts", registry=registry)
        self.found_tokens = Counter(
            "tilemesh_prefix_hit_tokens", "Of these, found in the prefix cache", registry=registry
        )
        self.output_tokens = Counter("tilemesh_output_tokens", "Tokens of answers", registry=registry)
        self.finished = Counter("tilemesh_answers", "Answers ended, by reason", ["reason"], registry=registry)
        self.first_token = Histogram(
            "tilemesh_time_to_first_token_seconds",
            "From a body to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "tilemesh_inter_token_seconds", "Between an answer's steps", buckets=_SECONDS, registry=registry
        )
        self.whole = Histogram(
            "tilemesh_request_seconds", "From a body to its last token", buckets=_SECONDS, registry=registry
        )
        self._running = Gauge("tilemesh_running_requests", "Requests that have pages", registry=registry)
        self._waiting = Gauge("tilemesh_waiting_requests", "Requests that wait", registry=registry)
        self._pages = Gauge("tilemesh_pages", "Pages of the pool by state", ["state"], registry=registry)
        self._version = Gauge("tilemesh_weights_version", "Of the weights that compute now", registry=registry)
        self._asleep = Gauge("tilemesh_sleep_level", "0: awake", registry=registry)
        self._steps = Gauge("tilemesh_steps", "Steps taken", registry=registry)
        self._step_tokens = Gauge("tilemesh_step_tokens", "Tokens computed in all steps", registry=registry)
        self._preemptions = Gauge("tilemesh_preemptions", "Requests whose pages were taken", registry=registry)
        self._guesses = Gauge(
            "tilemesh_guessed_tokens", "Tokens guessed ahead, by outcome", ["outcome"], registry=registry
        )

    def text(self) -> bytes:
        now = self._status()
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        self._pages.labels("used").set(now.pages_used)
        self._pages.labels("idle").set(now.pages_idle)
        self._pages.labels("free").set(now.pages - now.pages_used - now.pages_idle)
        self._version.set(now.version)
        self._asleep.set(now.asleep)
        self._steps.set(now.steps)
        self._step_tokens.set(now.step_tokens)
        self._preemptions.set(now.preemptions)
        self._guesses.labels("right").set(now.guessed_right)
        self._guesses.labels("wrong").set(now.guessed - now.guessed_right)
        return bytes(generate_latest(self._registry))
