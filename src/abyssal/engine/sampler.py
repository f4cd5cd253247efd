"""From logits to tokens.

The order is vLLM's: logit_bias, min_tokens, repetition, frequency and presence penalties, temperature, min_p, top_k, top_p, draw.
A grammar's mask comes after the penalties.
Ties always go to the lowest token id. Nothing of one request depends on what else is in the batch, and a draw depends on the
request's seed and the number of the token alone, so that a preempted or restarted request repeats itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from abyssal.engine.request import SamplingParams, TokenLogprobs, ending_token_ids
from abyssal.errors import RequestError
from abyssal.kv.batch import staged
from abyssal.ops.select_topk import select_topk

LOGPROB_FLOOR = -9999.0  # stands for everything below, minus infinity too: JSON has no infinity
_TEMPERATURES = (1e-6, 1e30)  # beyond these, fp32 quotients of logits overflow or vanish
_PENALTIES = (1e-30, 1e30)  # likewise products
_WEIGHT_ONE = 2.0**40  # probabilities become integers of 2^-40: their sums are exact in any order, on any device
_NO_LIMIT = 1 << 40  # a top_k beyond every vocabulary
_ROWS_PER_SLICE = 64  # rows scored at once: [64, 129280] fp32 is 33 MB


class SampledToken(NamedTuple):
    """One row's outcome. With `error` set the request cannot go on, and `token_id` is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class TokenMask(Protocol):
    """Restricts one request's tokens, step by step."""

    def apply(self, logits: Tensor) -> None:
        """Set one row fp32 [V] to -inf, in place, where no token is allowed now."""

    def append(self, token_id: int) -> None:
        """Take note of a generated token."""


class SamplerState:
    """What sampling needs to know of one request. It derives from the request and its output ids, nothing else.

    Args:
        fallback_seed: (engine seed, number of the request), for a request without a seed of its own.
        output_ids: tokens generated already, for a request that is taken up again.
        mask: of the request's grammar, as it is before the first token.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Iterable[int],
        fallback_seed: tuple[int, int],
        output_ids: Iterable[int] = (),
        mask: TokenMask | None = None,
    ) -> None:
        self.params = params
        self.prompt_ids = prompt_ids
        self.mask = mask
        self._always_edits = bool(params.logit_bias) or self._penalises or mask is not None
        self.ending_ids = sorted(ending_token_ids(params, eos_token_ids))
        # Tokens generated from which on those that follow are plain, as in `is_plain`
        always_waits = self._always_edits or params.logprobs is not None
        self._plain_from = math.inf if always_waits else params.min_tokens if self.ending_ids else 0
        self.output_ids: list[int] = []
        for token in output_ids:
            self.append(token)
        self._stream = f"request {params.seed}" if params.seed is not None else "engine {} {}".format(*fallback_seed)
        self._seen: Tensor | None = None  # bool [V], the token occurs in the prompt or the output
        self._counts: Tensor | None = None  # fp32 [V], occurrences in the output
        self._num_counted = 0

    def append(self, token_id: int) -> None:
        """Take note of a generated token. Tokens are never taken back."""
        self.output_ids.append(token_id)
        if self.mask is not None:
            self.mask.append(token_id)

    @property
    def edits_logits(self) -> bool:
        return self._always_edits or self._masks_endings

    def edit(self, logits: Tensor) -> None:
        """Apply bias, min_tokens, penalties and the mask to one row fp32 [V], in place."""
        if bias := self.params.logit_bias:
            ids = torch.tensor(list(bias), device=logits.device)
            logits[ids] += torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
        if self._masks_endings:
            logits[torch.tensor(self.ending_ids, device=logits.device)] = -torch.inf
        if self._penalises:
            seen, counts = self._penalty_tables(logits)
            logits.copy_(_penalise(logits, seen, counts, self.params))
        if self.mask is not None:
            self.mask.apply(logits)

    @property
    def is_plain(self) -> bool:
        """Whether, from the next token on, tokens follow from logits and random numbers alone, and nothing but tokens is asked for."""
        return len(self.output_ids) >= self._plain_from

    def next_uniform(self, ahead: int = 0) -> float:
        """The random number in [0, 1) for the next token: 53 bits of a hash of the stream and the number of the token.

        `ahead` tokens are drawn and not appended yet.
        """
        digest = hashlib.blake2b(f"{self._stream} {len(self.output_ids) + ahead}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    @property
    def truncates(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1

    @property
    def _masks_endings(self) -> bool:
        return len(self.output_ids) < self.params.min_tokens and bool(self.ending_ids)

    @property
    def _penalises(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0

    def _penalty_tables(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Seen and counts on the device of `logits`, brought up to date with the output."""
        if self._seen is None or self._counts is None:
            self._seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            self._seen[torch.tensor(self.prompt_ids, device=logits.device)] = True
            self._counts = torch.zeros(logits.shape[-1], device=logits.device)
        if self._num_counted < len(self.output_ids):
            new = torch.tensor(self.output_ids[self._num_counted :], device=logits.device)
            self._seen[new] = True
            self._counts += torch.bincount(new, minlength=logits.shape[-1])
            self._num_counted = len(self.output_ids)
        return self._seen, self._counts


def sample(logits: Tensor, states: list[SamplerState]) -> list[SampledToken]:
    """Choose one token per row.

    Temperature 0 takes the largest logit. Any other temperature counts as at least 1e-6, and a token of a probability below
    2^-40 is never drawn. A row without a usable distribution ends its own request only.

    Args:
        logits: fp32 [S, V], read only; -inf is allowed and means never.
        states: one per row; the caller appends the token to its state.
    """
    if not states:
        return []
    edited = _edit(logits, states)
    best, tokens = edited.max(-1)  # the first of equal values, as max is documented
    drawn = [i for i, state in enumerate(states) if state.params.temperature > 0]
    if drawn:
        settings = _Settings.of([states[i] for i in drawn], [0] * len(drawn), logits.device)
        tokens[drawn] = _draw(edited[drawn], settings, any(states[i].truncates for i in drawn))
    # NaN and +inf surface in their row's largest value, and a row without any candidate has -inf: the maximum tells all.
    raw_best = best if edited is logits else logits.amax(-1)
    ids, raw, left = torch.stack((tokens.double(), raw_best.double(), best.double())).tolist()  # ids are exact
    chosen = [int(token) for token in ids]
    errors = [_complaint(math.isfinite(r), math.isfinite(b)) for r, b in zip(raw, left, strict=True)]
    rows = [i for i, state in enumerate(states) if state.params.logprobs is not None and errors[i] is None]
    scores = _score(logits[rows], [chosen[i] for i in rows], [states[i].params.logprobs or 0 for i in rows]) if rows else []
    logprobs = dict(zip(rows, scores, strict=True))
    return [SampledToken(-1, error=e) if e else SampledToken(chosen[i], logprobs.get(i)) for i, e in enumerate(errors)]


def sample_plain(logits: Tensor, states: list[SamplerState], ahead: list[int], largest: Callable[[Tensor], Tensor]) -> Tensor:
    """The tokens that `sample` chooses where all `states` are plain, without waiting for the device.

    Args:
        logits: fp32 [S, V].
        largest: `argmax` of `abyssal.ops`.
        ahead: of each request, tokens that are drawn and not appended to its state yet.

    Returns:
        int64 [2, S] on the device: tokens, valid ids in any case, and whether the logits were usable.
    """
    result = largest(logits)
    if any(state.params.temperature > 0 for state in states):
        settings = _Settings.of(states, ahead, logits.device)
        drawn = _draw(logits, settings, any(state.truncates for state in states))
        result[0] = torch.where(settings.draws, drawn, result[0])
    return result


def unusable() -> SampledToken:
    """What becomes of a request whose logits were not usable."""
    return SampledToken(-1, error=_complaint(model_ok=False, usable=False))


def prompt_logprobs(logits: Tensor, targets: list[int], num_top: int) -> list[TokenLogprobs]:
    """Score the given token of every row.

    Args:
        logits: fp32 [n, V].
        targets: n token ids, those that follow.
        num_top: alternatives per row.

    Raises:
        RequestError: the logits are not finite.
    """
    if not targets:
        return []
    if not logits.amax(-1).isfinite().all():
        raise RequestError("the model gave no usable logits (NaN or infinite) for the prompt; prompt_logprobs cannot be computed")
    return _score(logits, targets, [num_top] * len(targets))


def _edit(logits: Tensor, states: list[SamplerState]) -> Tensor:
    """Bias, min_tokens, penalties and masks of all rows; `logits` itself where no row has any."""
    if not any(state.edits_logits for state in states):
        return logits
    edited = logits.clone()
    for row, state in zip(edited, states, strict=True):
        if state.edits_logits:
            state.edit(row)
    return edited


def _penalise(row: Tensor, seen: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """CTRL's repetition penalty on prompt and output, OpenAI's frequency and presence penalties on the output.

    Finite logits stay finite at any strength; -inf stays -inf.
    """
    strength = _clamp(params.repetition_penalty, _PENALTIES)
    largest = torch.finfo(row.dtype).max
    scaled = torch.where(row > 0, row / strength, row * strength).clamp(-largest, largest)
    row = torch.where(seen & row.isfinite(), scaled, row)
    return row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What drawing needs to know of R rows, on the device of their logits; each [R, 1]."""

    temperatures: Tensor  # fp32
    min_p: Tensor  # fp64
    top_k: Tensor  # int64, the vocabulary for no limit
    top_p: Tensor  # fp64
    uniform: Tensor  # fp64
    draws: Tensor  # bool [R], temperature above 0; other rows draw in vain

    @classmethod
    def of(cls, states: list[SamplerState], ahead: list[int], device: torch.device) -> _Settings:
        rows = [
            (s.params.temperature, s.params.min_p, s.params.top_k or _NO_LIMIT, s.params.top_p, s.next_uniform(drawn))
            for s, drawn in zip(states, ahead, strict=True)
        ]
        values = np.array(rows, np.float64).T[:, :, None]
        temperatures, min_p, top_k, top_p, uniform = staged(values, device).to(device, non_blocking=True)
        return cls(
            temperatures.clamp(*_TEMPERATURES).float(), min_p, top_k.long(), top_p, uniform, draws=temperatures.squeeze(1) > 0
        )


def _draw(logits: Tensor, settings: _Settings, truncates: bool) -> Tensor:
    """One token id int64 per row of edited logits [R, V]; `truncates`: whether some row has a top_k or top_p."""
    weights = _weights(logits, settings)
    if truncates:
        weights = _truncate(logits, weights, settings)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, where no token lies. The last minimum is for rows that end in an error anyway.
    target = torch.minimum((settings.uniform * total).long(), total - 1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _weights(logits: Tensor, settings: _Settings) -> Tensor:
    """Probabilities after temperature and min_p, as int64 [R, V] multiples of 2^-40."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / settings.temperatures
    weights = (scaled.softmax(-1).double() * _WEIGHT_ONE).long()
    return torch.where(weights >= settings.min_p * weights.amax(-1, keepdim=True), weights, 0)


def _truncate(logits: Tensor, weights: Tensor, settings: _Settings) -> Tensor:
    """Zero the weights [R, V] outside the top_k largest logits and, of those left, outside the smallest set of mass top_p.

    A row without limits keeps all of its weights.
    """
    vocab, device = logits.shape[-1], logits.device
    order = logits.sort(dim=-1, descending=True, stable=True).indices  # stable: ties in the order of ids
    ranked = weights.gather(-1, order)
    ranked = torch.where(torch.arange(vocab, device=device) < settings.top_k, ranked, 0)
    cumulative = ranked.cumsum(-1)
    ranked = torch.where(cumulative - ranked < settings.top_p * cumulative[:, -1:], ranked, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked)


def _score(logits: Tensor, targets: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `targets` and of the `num_top` best tokens of each row of raw logits [n, V]."""
    result: list[TokenLogprobs] = []
    for start in range(0, len(targets), _ROWS_PER_SLICE):
        part = slice(start, start + _ROWS_PER_SLICE)
        result += _score_slice(logits[part], targets[part], num_top[part])
    return result


def _score_slice(logits: Tensor, targets: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    vocab = logits.shape[-1]
    target = torch.tensor(targets, device=logits.device).unsqueeze(-1)
    own = logits.gather(-1, target)
    earlier = (logits == own) & (torch.arange(vocab, device=logits.device) < target)
    ranks = 1 + ((logits > own) | earlier).sum(-1)
    logprobs = logits.log_softmax(-1).clamp(min=LOGPROB_FLOOR)
    everything = torch.full((len(targets),), vocab, device=logits.device)
    top = select_topk(logits, everything, max(*num_top, 1)).long()  # ids ascend, so the stable sort orders ties by id
    top = top.gather(-1, logits.gather(-1, top).sort(dim=-1, descending=True, stable=True).indices)
    own_list, top_list = logprobs.gather(-1, target).squeeze(-1).tolist(), logprobs.gather(-1, top).tolist()
    rows = zip(targets, own_list, ranks.tolist(), top.tolist(), top_list, num_top, strict=True)
    return [TokenLogprobs(token, own, rank, ids[:k], values[:k]) for token, own, rank, ids, values, k in rows]


def _complaint(model_ok: bool, usable: bool) -> str | None:
    if not model_ok:
        return "the model gave no usable logits (NaN or infinite) for this request"
    return (
        None if usable else "no token is left to choose from: min_tokens or the grammar forbids every token that the model allows"
    )


def _clamp(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
