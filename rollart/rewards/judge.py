"""A language model as the judge, behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import re

from rollart.rewards.view import Score, TrajectoryView, Unavailable

__all__ = ["judge"]

PROMPT = (
    "Judge the answer to a task. Give a grade from 0 (wrong) to 10 (right and complete), on a last line of the form "
    "'Grade: N'.\n\nThe task:\n{question}\n\nA reference solution, which may be empty:\n{reference}\n\n"
    "The answer:\n{answer}\n"
)
GRADE = r"[Gg]rade:\s*\**\s*(-?\d+(?:\.\d+)?)"
AGAIN = frozenset({408, 409, 425, 429})


async def judge(
    trajectory: TrajectoryView,
    *,
    base_url: str,
    model: str,
    prompt: str = PROMPT,
    pattern: str = GRADE,
    best: float = 10.0,
    api_key_env: str | None = None,
    max_tokens: int = 512,
    temperature: float = 0.0,
    timeout_s: float = 120.0,
) -> Score:
    """The model's grade over ``best``, cut to [0, 1].

    ``prompt`` has the places {question} (the first observation), {answer} (the last answer), {transcript} and
    {reference}; ``pattern`` finds the grade, the last time that it matches.  ``api_key_env`` names the environment
    variable with the key.  An answer without a grade is an error, and no zero.
    """
    import aiohttp

    turns = trajectory.turns
    text = prompt.format(
        question=turns[0].observation if turns else "",
        answer=trajectory.answer,
        transcript=trajectory.text,
        reference=trajectory.environment.reference,
    )
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    headers = {}
    if api_key_env is not None:
        key = os.environ.get(api_key_env)
        if not key:
            raise ValueError(f"the environment variable {api_key_env} is not set")
        headers["Authorization"] = f"Bearer {key}"
    url = f"{base_url.rstrip('/')}/chat/completions"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), trust_env=True) as session,
            session.post(url, json=body, headers=headers) as answer,
        ):
            if answer.status >= 500 or answer.status in AGAIN:
                raise Unavailable(f"{url} answered {answer.status}")
            if answer.status != 200:
                raise ValueError(f"{url} answered {answer.status}: {(await answer.text())[:200]}")
            told = await answer.json()
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from None
    try:
        said = str(told["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"{url} gave an answer without choices[0].message.content") from None
    grades = re.findall(pattern, said)
    if not grades:
        raise ValueError(f"the judge gave no grade: {said[-200:]!r}")
    grade = float(grades[-1])
    return Score(score=min(max(grade / best, 0.0), 1.0), parts={"grade": grade})
