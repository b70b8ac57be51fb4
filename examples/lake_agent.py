"""An agent as one writes it for any OpenAI-compatible model: it crosses a frozen lake by calling a tool."""

import json

from openai import AsyncOpenAI

from rollart.environments.frozen_lake import FrozenLake

TOOL = {"name": "go", "parameters": {"type": "object", "properties": {"to": {"enum": ["L", "D", "R", "U"]}}}}
CLIENT = AsyncOpenAI(base_url="http://localhost/v1", api_key="each episode has its own")


async def play(episode):
    """Play the episode, and return its score."""
    client = CLIENT.with_options(base_url=episode.base_url, api_key=episode.api_key)
    lake = FrozenLake(**episode.options)
    messages = [{"role": "user", "content": lake.reset(episode.seed, episode.split)}]
    for _ in range(8):
        answer = await client.chat.completions.create(
            model=episode.model, messages=messages, tools=[{"type": "function", "function": TOOL}]
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            turn = lake.step(json.loads(call.function.arguments)["to"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": turn.text})
            if turn.done:
                return turn.reward
    return 0.0
