"""What goes into the engine and what comes out: plain dataclasses, shared by the Python API and the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen. Names, defaults and ranges are those of the OpenAI API and vLLM."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # top alternatives per generated token; 0 = the chosen one only
    prompt_logprobs: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None  # None = as many as fit
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate. `n` > 1 is n of these."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the distribution before temperature and truncation."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class RequestUpdate:
    """What one engine step did for one request."""

    request_id: str
    token_ids: list[int]  # newly generated, in order; an EOS or stop token that ends the request is included
    logprobs: list[TokenLogprobs] | None  # one per token of token_ids, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None  # once, with the first token; entry 0 is None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop id that ended it
    error: str | None = None
    num_cached_tokens: int = 0
