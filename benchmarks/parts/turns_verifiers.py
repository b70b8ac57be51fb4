"""The turns exchange by the ``verifiers`` rollout loop against a local endpoint: one row of ``benchmarks.controller``.

The endpoint is an aiohttp server in a process of its own that answers at once, with ids and
log-probabilities as vLLM's OpenAI-style server gives them.  The environment is in the loop's process, as
``verifiers`` has it, and answers at once too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import sys
from typing import Any

import uvloop
from aiohttp import web

from benchmarks.parts.turns_peer import Counter, measure, write_row
from benchmarks.parts.turns_shape import ANSWER_TOKENS, FIRST_TOKENS, OBSERVATION_TOKENS, TURNS

CHARACTERS_PER_TOKEN = 4


def _completion() -> bytes:
    logprobs = [{"token": "word", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * ANSWER_TOKENS
    return json.dumps(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "model",
            "prompt_token_ids": [40] * FIRST_TOKENS,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "word" * ANSWER_TOKENS},
                    "logprobs": {"content": logprobs},
                    "token_ids": [7] * ANSWER_TOKENS,
                }
            ],
            "usage": {"prompt_tokens": 64, "completion_tokens": ANSWER_TOKENS, "total_tokens": 80},
        }
    ).encode()


def _serve(port: Any) -> None:
    body = _completion()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def main() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def _measure(live: int, turns_wanted: int, port: int) -> dict[str, object]:
    import verifiers as vf  # type: ignore[import-not-found]
    from datasets import Dataset  # type: ignore[import-not-found]
    from verifiers.types import ClientConfig  # type: ignore[import-not-found]

    counter = Counter()

    class Turns(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            counter.turns += 1
            return [{"role": "user", "content": "word" * OBSERVATION_TOKENS}]

    async def reward(**_: Any) -> float:
        return 1.0

    prompt = [{"role": "user", "content": "word" * FIRST_TOKENS}]
    rows = [{"prompt": prompt, "answer": "", "example_id": 0}]
    environment = Turns(max_turns=TURNS, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reward]))
    config = ClientConfig(
        api_key_var="BENCHMARK_KEY", api_base_url=f"http://127.0.0.1:{port}/v1", max_retries=0
    )
    from verifiers.clients import resolve_client

    client = resolve_client(config)

    async def episode(number: int, count: int) -> None:
        output = await environment.run_rollout(
            rows[0], client, "model", {"logprobs": True, "max_tokens": ANSWER_TOKENS}
        )
        if output.get("error"):
            raise RuntimeError(f"a rollout failed: {output['error']}")
        counter.turns += 1  # the last turn has no answer of the environment

    tokens = FIRST_TOKENS + TURNS * (ANSWER_TOKENS + OBSERVATION_TOKENS) // 2
    return await measure(
        live, turns_wanted, counter, episode, token_bytes=lambda: live * tokens * CHARACTERS_PER_TOKEN
    )


def main() -> None:
    """Measure, with the endpoint beside."""
    os.environ["BENCHMARK_KEY"] = "none"
    logging.disable(logging.WARNING)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    try:
        row = uvloop.run(_measure(int(sys.argv[1]), int(sys.argv[2]), here.recv()))
    finally:
        server.terminate()
        server.join()
    write_row(row)


if __name__ == "__main__":
    main()
