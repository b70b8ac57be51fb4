"""Which parameters of a call are followed, which change nothing, and which are refused, each with its reason.

The rule is the run's own: what the trainer can't reproduce is refused and never silently changed.  A parameter at the
value that changes nothing is accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollart.controller.configuration import REFUSED_SAMPLING
from rollart.endpoint.errors import bad_request

__all__ = ["FOLLOWED", "refuse_unknown"]

FOLLOWED = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "temperature",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "logprobs",
        "stream",
        "stream_options",
        "chat_template_kwargs",
    }
)
_HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""They say nothing of what is sampled."""

_NO_GRAMMAR = "the trainer does not know the grammar's state at each token"
_NEUTRAL: dict[str, Collection[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values that change nothing; so does null, for every parameter."""
_REFUSED = REFUSED_SAMPLING | {
    "n": "a call is one turn of the trajectory; make several calls that differ, such as in `user`",
    "best_of": "choosing among samples changes the distribution",
    "echo": "the answer holds sampled tokens only",
    "suffix": "the policy is asked for what follows a prompt",
    "seed": "trajectories of a group would sample the same answers, and the group would have no signal",
    "length_penalty": "it belongs to beam search",
    "top_logprobs": "the engine reports the log-probability of the sampled token only",
    "parallel_tool_calls": "the policy can't be kept from several calls in one answer",
    "response_format": _NO_GRAMMAR,
    "reasoning_effort": "no part of the run follows it; a template's own settings go into chat_template_kwargs",
    "verbosity": "no part of the run follows it",
    "functions": "it is the old form of tools: use those",
    "function_call": "it is the old form of tool_choice: use that",
    "ignore_eos": "it is a setting of the run: sampling.ignore_eos",
    "stop_token_ids": "they are a setting of the run: sampling.stop_token_ids",
    "allowed_token_ids": "they are a setting of the run: sampling.allowed_token_ids",
    "guided_json": _NO_GRAMMAR,
    "guided_regex": _NO_GRAMMAR,
    "guided_choice": _NO_GRAMMAR,
    "guided_grammar": _NO_GRAMMAR,
}


def refuse_unknown(body: Mapping[str, Any]) -> None:
    """``ApiError`` (400) that names the first parameter that can't be followed, and why."""
    for name, value in body.items():
        if name in FOLLOWED or name in _HARMLESS or value is None or value in _NEUTRAL.get(name, ()):
            continue
        reason = _REFUSED.get(name)
        if reason is None:
            raise bad_request(name, f"there is no parameter {name!r}", code="unknown_parameter")
        raise bad_request(name, f"{name} is not supported: {reason}", code="unsupported_parameter")
