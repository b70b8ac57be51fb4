"""The built-in kinds of rewards, and the endpoints of the clouds as their documents describe them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from aiohttp import web

from rollart.config.rewards import Reward
from rollart.controller.reward_backends import backends
from rollart.controller.reward_calls import Caller, CallError, FailureKind, Stats
from rollart.controller.signatures import AlibabaKeys, AwsKeys, sign_alibaba, sign_aws
from rollart.rewards import (
    EnvironmentView,
    TrajectoryView,
    TurnView,
    Unavailable,
    exact_match,
    format_check,
    group_rank,
    schema_check,
    turns_match,
)
from rollart.rewards.code_tests import code_tests
from rollart.rewards.judge import judge
from rollart.rewards.maths import maths_check
from rollart.rewards.payload import Meter, Reply, Request, Result, encode


def said(*answers: str, reference: str = "", reward: float = 0.0) -> TrajectoryView:
    return TrajectoryView(
        id=0,
        task="T",
        seed=0,
        split="train",
        turns=[TurnView("question", answer) for answer in answers],
        environment=EnvironmentView(reward=reward, reference=reference),
    )


# --- text ---------------------------------------------------------------------------------------------------


def test_exact_match_compares_what_it_extracts() -> None:
    assert exact_match(said(" 42 ", reference="42")).score == 1.0
    assert exact_match(said("42", reference="43")).score == 0.0
    boxed = r"\\boxed\{(.*?)\}"
    assert (
        exact_match(said(r"\boxed{1} so \boxed{Ja}", reference="ja"), extract=boxed, ignore_case=True).score
        == 1
    )
    assert exact_match(said("none", reference="none"), extract=boxed).score == 0.0


def test_formats_schemas_and_turns() -> None:
    assert format_check(said("x", "<a>1</a>"), pattern="<a>.*</a>") == 1.0
    assert format_check(said("x", "<a>1</a>"), pattern="<a>.*</a>", every_turn=True) == 0.5
    assert format_check(said("12345"), max_characters=4) == 0.0
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert schema_check(said('{"a": 1}'), schema=schema).score == 1.0
    assert schema_check(said('{"a": "1"}', reference=json.dumps(schema))).score == 0.5
    assert schema_check(said("{"), schema=schema).score == 0.0
    assert turns_match(said("L", "go", "R"), pattern="[LR]", penalty=0.5).turns == [1.0, -0.5, 1.0]


def test_ranks_in_a_group() -> None:
    group = [said("a", reward=reward) for reward in (0.0, 1.0, 1.0, 3.0)]
    assert group_rank(group) == [0.0, 0.5, 0.5, 1.0]
    assert group_rank([said("long"), said("s")], by="brevity") == [0.0, 1.0]
    assert group_rank([said("alone")]) == [0.5]


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
        ("so x is \\boxed{2\\sqrt{3}}", "$\\sqrt{12}$", 1.0),
        ("I get 41", "42", 0.0),
        ("no idea", "42", -1.0),
    ],
)
def test_maths_are_compared_as_maths(answer: str, reference: str, score: float) -> None:
    assert maths_check(said(answer, reference=reference), unparsable=-1.0).score == score


def test_a_reference_that_is_no_maths_is_an_error() -> None:
    with pytest.raises(ValueError, match="is no mathematical expression"):
        maths_check(said("42"))


# --- code ---------------------------------------------------------------------------------------------------

SQUARE = "Here:\n```python\ndef f(x):\n    return x * x\n```\n"
ASSERTS = json.dumps({"asserts": ["assert f(2) == 4", "assert f(3) == 9", "assert f(1) == 2"]})


def test_code_gets_the_share_of_its_tests() -> None:
    graded = code_tests(said(SQUARE, reference=ASSERTS))
    assert graded.score == pytest.approx(2 / 3) and graded.success == 0.0
    assert code_tests(said(SQUARE, reference=ASSERTS), all_or_nothing=True).score == 0.0
    assert code_tests(said(SQUARE, reference="assert f(2) == 4\nassert f(0) == 0")).score == 1.0
    io = json.dumps({"io": [{"input": "3\n", "output": "9\n"}, {"input": "4", "output": "15"}]})
    assert code_tests(said("print(int(input()) ** 2)", reference=io)).score == 0.5
    with pytest.raises(ValueError, match="no tests"):
        code_tests(said(SQUARE, reference=""))


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "while True: pass",
        "x = bytearray(4 << 30)",
        "open('/dev/full', 'w').write('x'); f = open('big', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20))",
        "import socket; socket.create_connection(('127.0.0.1', {port}))",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)\nwhile True: pass",
    ],
)
def test_code_that_misbehaves_passes_nothing_and_leaves_nothing(code: str, tmp_path: Path) -> None:
    import socket

    before = {p.pid for p in psutil.process_iter()}
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = code.replace("{port}", str(server.getsockname()[1]))
        graded = code_tests(said(program, reference="assert 1 + 1 == 2"), timeout_s=1.0)
    reached = "socket" in code and not graded.parts["isolated"]  # where ordinary users have no namespaces
    assert graded.score == float(reached)
    new = [p for p in psutil.process_iter(["name", "cmdline"]) if p.pid not in before]
    assert not [p for p in new if "answer.py" in " ".join(p.info["cmdline"] or [])]


# --- endpoints ----------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def served(path: str, handler: Handler) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post(path, handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_judge_grades_and_never_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(200, "Good. Grade: 7"), (200, "hm"), (503, ""), (401, "no key")])
    seen = []

    async def complete(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], (await request.json())["messages"][0]["content"]))
        status, text = next(answers)
        return web.json_response({"choices": [{"message": {"content": text}}]}, status=status)

    monkeypatch.setenv("JUDGE_KEY", "k-1")
    async with served("/v1/chat/completions", complete) as url:
        ask = {"base_url": f"{url}/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
        assert (await judge(said("my answer", reference="the solution"), **ask)).score == 0.7
        assert seen[0][0] == "Bearer k-1" and "my answer" in seen[0][1] and "the solution" in seen[0][1]
        with pytest.raises(ValueError, match="gave no grade"):
            await judge(said("a"), **ask)
        with pytest.raises(Unavailable, match="503"):
            await judge(said("a"), **ask)
        with pytest.raises(ValueError, match="401"):
            await judge(said("a"), **ask)


async def asked(url: str, **settings: Any) -> tuple[Reply | CallError, Stats]:
    reward = msgspec.convert({"function": "m:f", "url": url, "retries": 0, **settings}, Reward)
    stats = Stats()
    caller = Caller(reward, backends(local=str)(reward), random.Random(0), stats)
    request = Request(key="k", function="m:f", deadline_s=5, trajectories=[said("a")])
    try:
        return await caller.call(request), stats
    except CallError as error:
        return error, stats
    finally:
        await caller.close()


OK = encode(Reply(results=[Result(score=0.5)], meter=Meter(busy_s=0.1)))


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (500, b"boom", FailureKind.INFRASTRUCTURE),
        (429, b"", FailureKind.INFRASTRUCTURE),
        (404, b"no such function", FailureKind.ERROR),
        (302, b"", FailureKind.ERROR),
        (200, b"<html>", FailureKind.REFUSED),
        (200, b'{"schema": "rollart.reward/9", "results": []}', FailureKind.REFUSED),
        (200, b'{"schema": "rollart.reward/1", "results": [{"score": NaN}]}', FailureKind.REFUSED),
    ],
)
async def test_answers_of_plain_http_are_classified(status: int, body: bytes, kind: FailureKind) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    async with served("/f", answer) as url:
        error, stats = await asked(f"{url}/f")
        assert isinstance(error, CallError) and error.kind is kind
        assert stats.counts[f"failed_{kind}"] == 1


async def test_plain_http_sends_the_documented_payload_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[Any, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        got.append((request.headers.copy(), await request.json()))
        return web.Response(body=OK, content_type="application/json")

    monkeypatch.setenv("GATEWAY_TOKEN", "t-2")
    async with served("/function/grade", answer) as url:
        reply, stats = await asked(f"{url}/function/grade", token_env="GATEWAY_TOKEN")
    assert isinstance(reply, Reply) and reply.results[0].score == 0.5 and stats.busy_s == 0.1
    headers, body = got[0]
    assert headers["Authorization"] == "Bearer t-2" and headers["Idempotency-Key"] == "k"
    assert body["schema"] == "rollart.reward/1" and body["scope"] == "trajectory"
    assert body["trajectories"][0]["turns"] == [{"observation": "question", "answer": "a", "reward": 0.0}]


async def test_a_connection_that_is_refused_is_infrastructure() -> None:
    error, _ = await asked("http://127.0.0.1:9/f?secret=s3cret")
    assert isinstance(error, CallError) and error.kind is FailureKind.INFRASTRUCTURE
    assert "s3cret" not in str(error)


async def test_lambda_is_invoked_as_its_api_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-3")
    answers: list[tuple[dict[str, str], bytes]] = [
        ({}, OK),
        ({"X-Amz-Function-Error": "Unhandled"}, b'{"errorType": "ValueError", "errorMessage": "bad rubric"}'),
        (
            {"X-Amz-Function-Error": "Unhandled"},
            b'{"errorMessage": "2026 Task timed out after 3.00 seconds"}',
        ),
        ({"X-Amz-Function-Error": "Unhandled"}, b'{"errorType": "Runtime.ExitError", "errorMessage": "x"}'),
    ]
    waiting = iter(answers)

    async def invoke(request: web.Request) -> web.Response:
        assert request.raw_path == "/2015-03-31/functions/grade%3Alive/invocations"
        body, sent = await request.read(), request.headers
        keys = AwsKeys("AKIDEXAMPLE", "very-secret", "session-3")
        now = datetime.strptime(sent["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        url = f"http://{sent['Host']}{request.raw_path}"
        plain = {name: sent[name] for name in ("X-Amz-Invocation-Type", "Content-Type")}
        signed = sign_aws(keys, "POST", url, plain, body, region="eu-central-1", service="lambda", now=now)
        assert sent["Authorization"] == signed["Authorization"] and "very-secret" not in str(sent)
        assert sent["X-Amz-Security-Token"] == "session-3"
        headers, answer = next(waiting)
        return web.Response(body=answer, headers=headers)

    async with served("/2015-03-31/functions/{name}/invocations", invoke) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", url)
        found = [(await asked("lambda://eu-central-1/grade:live"))[0] for _ in answers]
    assert isinstance(found[0], Reply)
    kinds = [each.kind for each in found[1:] if isinstance(each, CallError)]
    assert kinds == [FailureKind.ERROR, FailureKind.TIMEOUT, FailureKind.INFRASTRUCTURE]
    assert "bad rubric" in str(found[1])


async def test_function_compute_is_called_with_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "LTAI")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "very-secret")
    monkeypatch.delenv("ALIBABA_CLOUD_SECURITY_TOKEN", raising=False)
    failing = iter([False, True])

    async def trigger(request: web.Request) -> web.Response:
        body, sent = await request.read(), request.headers
        signed = sign_alibaba(
            AlibabaKeys("LTAI", "very-secret"),
            "POST",
            f"http://{sent['Host']}{request.raw_path}",
            {},
            body,
            now=datetime.strptime(sent["x-acs-date"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC),
            nonce=sent["x-acs-signature-nonce"],
        )
        assert sent["Authorization"] == signed["Authorization"] and "very-secret" not in str(sent)
        headers = {"X-Fc-Error-Type": "UnhandledInvocationError"} if next(failing) else {}
        return web.Response(body=OK, headers=headers)

    async with served("/grade", trigger) as url:
        reply, _ = await asked(f"fc+{url}/grade?b=2&a=1")
        error, _ = await asked(f"fc+{url}/grade")
    assert isinstance(reply, Reply)
    assert isinstance(error, CallError) and error.kind is FailureKind.ERROR


async def test_a_cancelled_call_hangs_up() -> None:
    hung_up = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            hung_up.set()
            raise
        return web.Response()

    async with served("/f", never) as url:
        call = asyncio.ensure_future(asked(f"{url}/f"))
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.wait_for(hung_up.wait(), 5)
