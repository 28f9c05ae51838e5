"""OpenAI's HTTP interface over an engine: completions and chat completions, whole or streamed.

The one idea: a body is read (`protocol`), its prompts become jobs of the engine, and one loop hears their parts: a
whole reply collects them, a stream passes them on. When that loop ends for any reason, a client that hung up included,
what is left of the jobs is aborted. Reading (tokens, templates, constraints) takes as long as a stranger likes: it has
threads of its own, so that the loop answers everybody else meanwhile, and limits, so that it ends.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tilemesh.core.access import Access
from tilemesh.core.errors import RunError, UsageError
from tilemesh.serve.admin import PATHS, admin_routes, check_adapters
from tilemesh.serve.answers import Completion, collect
from tilemesh.serve.bodies import CLOSED_BY_CLIENT, FAILED, INVALID, NO_ANSWER, parse_body, read_body, refusal
from tilemesh.serve.chat import ChatTemplate
from tilemesh.serve.engine import Engine
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.metrics import ServerMetrics
from tilemesh.serve.offline import SubmitOptions
from tilemesh.serve.protocol import AskedCompletion, RefusedError, read_chat, read_completion
from tilemesh.serve.replicas import Replicas
from tilemesh.serve.replies import (
    ReplyHead,
    chat_logprobs,
    chunk_choice,
    delta_choice,
    echoed_logprobs,
    failure,
    finish_word,
    text_logprobs,
    usage,
    whole_choices,
    without_answers,
)
from tilemesh.serve.request import FinishReason
from tilemesh.serve.text import Spelling, TokenTexts
from tilemesh.serve.texts import PATHS as TEXT_PATHS
from tilemesh.serve.texts import text_routes
from tilemesh.serve.tools import AnswerReader, delta_fields, whole_message

_READERS = 2  # threads that read bodies
_MOST_NAMED = 100  # fields in the log: a stranger may call a format anything


def make_app(
    engine: Engine | Replicas,
    name: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    access: Access | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Starlette:
    """The application: `name` is what the model is called, by default as its folder; `defaults` are fields of
    `Sampling` for requests that do not say; `access` says who may ask, by default everybody but other pages. `say`
    hears once of each field that is accepted and means nothing here."""
    access = access or Access()
    server = ServingApp(engine, name or engine.served.name, defaults or {}, say)
    check_adapters(engine.adapters, server.name)
    answer: Callable[[str, bool], Callable[[Request], Awaitable[Response]]] = server.answering
    return Starlette(
        routes=[
            Route("/v1/completions", answer("/v1/completions", False), methods=["POST"]),
            Route("/v1/chat/completions", answer("/v1/chat/completions", True), methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/health", server.health),
            Route("/metrics", server.prometheus),
            *text_routes(server),
            *admin_routes(engine, server.name, has_key=bool(access.keys)),
        ],
        exception_handlers={404: _not_here, 405: _not_here, **dict.fromkeys(NO_ANSWER, server.refuse)},
        middleware=[*_cross_origin(access), Middleware(_Guard, access=access)],
    )


def _cross_origin(access: Access) -> list[Middleware]:
    """What lets a browser's page read answers: only where pages are allowed."""
    if not access.origins:
        return []
    origins, methods = sorted(access.origins), ["GET", "POST"]
    return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])]


class _Guard:
    """Answers those who may not ask, before anything is read of what they send. /health needs no key."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
            refusal = self.access.refusal(headers, needs_key=scope["path"] != "/health")
            if refusal is not None:
                more = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
                body = failure(refusal.why, INVALID, None, refusal.code)
                await JSONResponse(body, refusal.status, more)(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _not_here(request: Request, error: Exception) -> Response:
    code = int(getattr(error, "status_code", 404))
    paths, texts = ", ".join(PATHS), ", ".join(TEXT_PATHS)
    posts = f"/v1/completions, /v1/chat/completions, {texts}, {paths} (with a key)"
    served = f"POST {posts}, GET /v1/models, /health and /metrics"
    message = f"{request.method} {request.url.path[:200]} is not served here: there are {served}"
    return JSONResponse(failure(message, INVALID), code)


class LiveReply:
    """The jobs of one body, and the one queue that their parts come through."""

    def __init__(
        self,
        engine: Engine | Replicas,
        prompts: list[list[int]],
        asked: AskedCompletion,
        metrics: ServerMetrics,
        loop: asyncio.AbstractEventLoop,
        spelling: Spelling | None,
    ) -> None:
        """`loop` is where the parts are heard; this may be called in any thread. `spelling`: of tokens whose
        log-probabilities are wanted."""
        self.engine, self.asked, self.metrics, self.spelling = engine, asked, metrics, spelling
        self.began = time.monotonic()
        self.parts: asyncio.Queue[tuple[int, AnswerPart]] = asyncio.Queue()
        self.left = len(prompts) * asked.sampling.n
        self.jobs: list[PromptJob] = []
        self.output_tokens = 0
        self._last: dict[int, float] = {}
        echoes = asked.sampling.prompt_logprobs is not None
        self._early: dict[int, list[tuple[int, AnswerPart]]] = {number: [] for number in range(len(prompts) * echoes)}
        """Parts that come before the first one of their prompt's first answer: the log-probabilities of the prompt are
        complete then."""

        def teller(number: int) -> Callable[[AnswerPart], None]:
            def tell(part: AnswerPart) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self.parts.put_nowait, (number, part))

            return tell

        try:
            for number, prompt in enumerate(prompts):
                options: SubmitOptions = {"priority": asked.priority, "continues": not asked.messages}
                self.jobs.append(engine.submit(prompt, asked.sampling, teller(number), **options))
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        for job in self.jobs:
            self.engine.abort(job)

    async def each(self) -> AsyncGenerator[tuple[int, AnswerPart], None]:
        """Parts with the number of their choice, until all answers have ended; raises where one has failed."""
        try:
            while self.left:
                number, part = await self.parts.get()
                choice = number * self.asked.sampling.n + part.answer
                self._measure(choice, part)
                self.left -= part.finish is not None
                if part.refused:
                    raise RefusedError(None, str(part.error))
                if part.finish is FinishReason.ERROR:
                    raise RunError(f"the engine could not answer: {part.error}")
                if part.finish is FinishReason.ABORT:
                    raise RunError("the server is stopping: this answer was not finished")
                if part.answer and number in self._early:
                    self._early[number].append((choice, part))
                    continue
                yield choice, part
                for early in self._early.pop(number, ()):
                    yield early
            self.metrics.whole.observe(time.monotonic() - self.began)
        finally:
            self.abort()
            if self.left:  # the client hung up, or another answer of this body failed
                self.metrics.finished.labels(FinishReason.ABORT.value).inc(self.left)

    def _measure(self, choice: int, part: AnswerPart) -> None:
        now, metrics = time.monotonic(), self.metrics
        if part.tokens:
            if choice in self._last:
                metrics.between_tokens.observe(now - self._last[choice])
            else:
                metrics.first_token.observe(now - self.began)
            self._last[choice] = now
            self.output_tokens += len(part.tokens)
            metrics.output_tokens.inc(len(part.tokens))
        if part.finish is not None:
            metrics.finished.labels(part.finish.value).inc()

    def usage(self) -> dict[str, Any]:
        prompt, found = sum(len(job.prompt) for job in self.jobs), sum(job.found for job in self.jobs)
        return usage(prompt, found, self.output_tokens)


class ServingApp:
    def __init__(
        self, engine: Engine | Replicas, name: str, defaults: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self.engine, self.name, self.defaults = engine, name, defaults
        self._say, self._named = say, set[str]()
        self.metrics = ServerMetrics(lambda: engine.status)
        self.created = int(time.time())
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="tilemesh-read")
        source = engine.served.chat_template
        self.template = None if source is None else ChatTemplate(source, engine.served.special_tokens or {})

    # ---- completions -------------------------------------------------------------------------------------------

    def answering(self, path: str, chat: bool) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                response = await self._answer(request, chat)
            except NO_ANSWER as error:
                response = await self.refuse(request, error)
            self.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return answer

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Of any path: what becomes of a request that raised one of `NO_ANSWER`."""
        return refusal(error, self.engine.retry_after_s)

    async def _answer(self, request: Request, chat: bool) -> Response:
        body = await read_body(request, self.engine.limits.context)
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._readers, self._begin, body, chat, loop)
        asked = reply.asked
        self.metrics.prompt_tokens.inc(sum(len(job.prompt) for job in reply.jobs))
        kind = "chatcmpl" if chat else "cmpl"
        name = asked.sampling.adapter or self.name
        head = ReplyHead(f"{kind}-{uuid.uuid4().hex}", int(time.time()), name, chat)
        if asked.stream:
            headers = {"Cache-Control": "no-cache"}
            return StreamingResponse(self._stream(reply, head), media_type="text/event-stream", headers=headers)
        return await self._whole(request, reply, head)

    def _begin(self, body: bytes, chat: bool, loop: asyncio.AbstractEventLoop) -> LiveReply:
        """Read a body and hand its prompts to the engine. In a thread of the readers."""
        parsed = parse_body(body, self.engine.limits.context)
        marks = () if self.template is None else self.template.marks
        asked = read_chat(parsed, self.defaults, marks) if chat else read_completion(parsed, self.defaults)
        for field in sorted(set(asked.ignored) - self._named)[: _MOST_NAMED - len(self._named)]:
            self._named.add(field)
            self._say(f"a request has '{field}', which is accepted and changes nothing here; it is not named again")
        wanted = replace(asked.sampling, adapter=self.adapter(asked.model))
        asked = replace(asked, sampling=replace(wanted, max_tokens=None) if asked.shortens else wanted)
        prompts = self._prompts(asked)
        if asked.shortens and wanted.max_tokens is not None:
            room = min(self.engine.check(prompt, asked.sampling) for prompt in prompts)
            asked = replace(asked, sampling=replace(wanted, max_tokens=min(room, wanted.max_tokens)))
        spelling = None if asked.sampling.logprobs is None else self._spelling
        return LiveReply(self.engine, prompts, asked, self.metrics, loop, spelling)

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a body names as its model; None: the model itself."""
        if name is None or name == self.name:
            return None
        if name not in self.engine.adapters:
            there = ", ".join(f"'{known}'" for known in (self.name, *sorted(self.engine.adapters)[:20]))
            why = f"model '{name[:200]}' is not served here: there is {there}"
            raise RefusedError("model", why, 404, "model_not_found")
        return name

    def _prompts(self, asked: AskedCompletion) -> list[list[int]]:
        if asked.messages:
            if self.template is None:
                raise RefusedError(
                    "messages", f"'{self.name}' has no chat template in its folder: use /v1/completions, or add one"
                )
            if len(asked.messages) > self.engine.limits.context:  # of which each takes at least one token
                raise RefusedError(
                    "messages",
                    f"{len(asked.messages):,} messages and the context is {self.engine.limits.context:,} tokens: "
                    "send fewer",
                )
            prompt = self.engine.encode(self.template(asked.messages, asked.tools), special=False)
            self.engine.check(prompt, asked.sampling)
            return [prompt]
        encoded = []
        for text_or_tokens in asked.prompts:  # checked one by one: the first that cannot be answered ends it
            encoded.append(self.engine.encode(text_or_tokens))
            self.engine.check(encoded[-1], asked.sampling)
        if len(encoded) > (most := self.engine.most_prompts(asked.sampling.n)):
            raise RefusedError(
                "prompt",
                f"{len(encoded)} prompts of {asked.sampling.n} answers each: expected at most {most} prompts; send "
                "them in several requests, or start with more --waiting",
            )
        return encoded

    async def _whole(self, request: Request, reply: LiveReply, head: ReplyHead) -> Response:
        """Collect the answers, unless the client hangs up before."""
        gone = asyncio.ensure_future(_until_gone(request))
        collecting = asyncio.ensure_future(_collected(reply))
        await asyncio.wait({gone, collecting}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not collecting.done():
            collecting.cancel()
            with suppress(asyncio.CancelledError):
                await collecting
            return Response(status_code=CLOSED_BY_CLIENT)
        try:
            completions = collecting.result()
        except UsageError as error:
            return JSONResponse(failure(str(error), INVALID), 400)
        except RunError as error:
            return JSONResponse(failure(str(error), FAILED), 500)
        self._count_found(reply)
        if reply.asked.scores:
            completions = [without_answers(completion) for completion in completions]
            reply.output_tokens = 0
        echoed = [self._echoed(reply, number) for number in range(len(completions))]
        choices = whole_choices(completions, head, reply.spelling, echoed, reply.jobs[0].continues)
        for choice in choices:
            if head.chat and (reader := self._reader(reply)) is not None:
                choice["message"] = whole_message(reader, choice["message"]["content"])
                choice["finish_reason"] = finish_word(choice["finish_reason"], reader)
        return JSONResponse({**head(choices), "usage": reply.usage()})

    def _reader(self, reply: LiveReply) -> AnswerReader | None:
        """Of one answer to a chat, where it may have more than content."""
        if self.template is None:
            return None
        asked, end = reply.asked, ""
        if asked.sampling.regex is None and asked.sampling.json_schema is None:  # else nothing can end reasoning
            end = self.engine.served.tokenizer.decode(reply.jobs[0].prompt[-8:])
        return self.template.reader(asked.tools, end)

    async def _stream(self, reply: LiveReply, head: ReplyHead) -> AsyncIterator[bytes]:
        """Server-sent events. When the client hangs up, this generator is closed, and `each` aborts the rest."""
        asked = reply.asked
        texts: dict[int, TokenTexts | None] = {}  # of tokens whose log-probabilities are wanted
        versions: dict[int, list[int]] = {}  # of tokens since the last chunk
        readers = [self._reader(reply) if head.chat else None for _ in range(len(reply.jobs) * asked.sampling.n)]

        def chunk(choice: dict[str, Any]) -> bytes:
            return _event({**head([choice], chunk=True), **({"usage": None} if asked.stream_usage else {})})

        try:
            async with aclosing(reply.each()) as parts:
                async for index, part in parts:
                    if index not in texts:
                        before, logprobs = self._opening(reply, index // asked.sampling.n)
                        spelling, is_first = reply.spelling, not reply.jobs[0].continues
                        texts[index] = None if spelling is None else TokenTexts(spelling, len(before), is_first)
                        if head.chat or asked.echo:
                            yield chunk(chunk_choice(head, index, before, None, logprobs, first=True))
                    versions.setdefault(index, []).extend([part.version] * len(part.tokens))
                    logprobs = None
                    if (own := texts[index]) is not None and part.logprobs:
                        logprobs = (chat_logprobs if head.chat else text_logprobs)(part.logprobs, own)
                    finish, reader = None if part.finish is None else part.finish.value, readers[index]
                    if reader is not None:
                        deltas = [delta_fields(delta) for delta in reader.add(part.text, last=finish is not None)]
                        for fields in deltas:
                            yield chunk(delta_choice(index, fields, None, logprobs, versions.pop(index, ())))
                            logprobs = None
                        if finish is not None or logprobs is not None:
                            last = finish_word(finish, reader)
                            yield chunk(delta_choice(index, {}, last, logprobs, versions.pop(index, ())))
                    elif part.text or finish is not None or logprobs is not None:
                        yield chunk(chunk_choice(head, index, part.text, finish, logprobs, versions.pop(index)))
            self._count_found(reply)
            if asked.stream_usage:
                yield _event({**head([], chunk=True), "usage": reply.usage()})
            yield b"data: [DONE]\n\n"
        except (RunError, UsageError) as error:
            yield _event(failure(str(error), FAILED if isinstance(error, RunError) else INVALID))

    def _opening(self, reply: LiveReply, number: int) -> tuple[str, dict[str, list[Any]] | None]:
        """What comes before an answer's own text: nothing, or the prompt where it is echoed."""
        text, job = self._echoed(reply, number), reply.jobs[number]
        if not reply.asked.echo or reply.spelling is None:
            return text, None
        known = [job.prompt_logprobs[position] for position in sorted(job.prompt_logprobs)]
        return text, echoed_logprobs(job.prompt, known, text, reply.spelling)

    def _echoed(self, reply: LiveReply, number: int) -> str:
        """A prompt where it is to be echoed: as it came, or the text of its tokens."""
        if not reply.asked.echo:
            return ""
        prompt = reply.asked.prompts[number]
        return prompt if isinstance(prompt, str) else self.engine.served.tokenizer.decode(prompt)

    @functools.cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.engine.served.tokenizer)

    def _count_found(self, reply: LiveReply) -> None:
        self.metrics.found_tokens.inc(sum(job.found for job in reply.jobs))

    # ---- the rest ----------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        data = [self._described(name) for name in (None, *sorted(self.engine.adapters))]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._described(self.adapter(request.path_params["name"])))

    def _described(self, adapter: str | None) -> dict[str, Any]:
        """The model, or one of its adapters."""
        longest = self.engine.limits.context
        fixed = {"object": "model", "owned_by": "tilemesh", "max_model_len": longest}
        loaded = self.engine.adapters.get(adapter or "")
        if adapter is None or loaded is None:
            return {"id": self.name, "created": self.created, **fixed}
        return {"id": adapter, "created": loaded.created, **fixed, "parent": self.name, "root": loaded.folder}

    async def health(self, request: Request) -> Response:
        if not self.engine.alive:
            return JSONResponse(failure("the engine has stopped", FAILED), 503)
        return JSONResponse({"status": "ok"})

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


# ---- bodies and clients ----------------------------------------------------------------------------------------


async def _until_gone(request: Request) -> None:
    """Returns when the client has hung up. The body was read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _collected(reply: LiveReply) -> list[Completion]:
    heard: list[list[AnswerPart]] = [[] for _ in reply.jobs]
    async with aclosing(reply.each()) as parts:
        async for choice, part in parts:
            heard[choice // reply.asked.sampling.n].append(part)
    return [collect(job, own) for job, own in zip(reply.jobs, heard, strict=True)]


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
