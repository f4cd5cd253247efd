"""A scripted model behind the engine's own sampling: its logits want the script's next token, and grammars decide what it gets."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from typing import Any

import torch

from abyssal.engine.grammar import GrammarMasks
from abyssal.engine.request import EngineRequest, FinishReason, RequestUpdate
from abyssal.engine.sampler import SamplerState, sample
from tests.serve.scripted import TOKENIZER, Script, ScriptedClient, engine_info

EOS = 1
MASKS = GrammarMasks(TOKENIZER, engine_info().model_vocab_size, [EOS])
DSML = 8
OPEN, SLASH = TOKENIZER.encode("</")
# What a model without a plan is given to: closing whatever may be open, less and less the more often it has tried.
HABITS = [OPEN, *(TOKENIZER.encode(text)[0] for text in ('"', "}", "]", "0", ">"))]


def aimless(ids: list[int]) -> dict[int, float]:
    """Token -> logit of a model without a plan, after `ids`: to end, to close a tag, or something of its habits."""
    wishes = {token: 40.0 - 2 * ids.count(token) for token in HABITS}
    if ids[-1:] == [OPEN]:
        wishes[SLASH] = 80.0
    if ids[-2:] == [OPEN, SLASH]:
        wishes[DSML] = 80.0
    return {**wishes, EOS: 90.0}


class SamplingClient(ScriptedClient):
    """Draws each token as the engine does. Once a grammar has refused the script's token, the script is over."""

    async def _updates(self, request: EngineRequest, limit: int) -> AsyncGenerator[RequestUpdate]:
        mask = None if request.grammar is None else MASKS.mask(request.grammar)
        state = SamplerState(request.params, request.prompt_ids, self.info.eos_token_ids, (0, 0), mask=mask)
        wanted = itertools.chain(self.script(request), itertools.repeat(None))
        noise = torch.Generator().manual_seed(0)
        for count in range(1, limit + 1):
            want = next(wanted)
            logits = torch.rand(self.info.model_vocab_size, generator=noise)
            for token, wish in aimless(state.output_ids).items():
                logits[token] += wish
            if want is not None:
                logits[want] += 200
            (drawn,) = sample(logits[None], [state])
            assert drawn.error is None, drawn.error
            state.append(drawn.token_id)
            if drawn.token_id != want:
                wanted = itertools.repeat(None)
            reason: FinishReason | None = "stop" if drawn.token_id in state.ending_ids else "length" if count == limit else None
            await self._pass(is_first=count == 1)
            yield self._update(request, [drawn.token_id], reason, is_first=count == 1)
            if reason is not None:
                return


def stubborn(text: str) -> Script:
    """Wants to say `text` whatever is asked of it; control tokens spelled in it are control tokens."""
    return lambda _: [*TOKENIZER.encode(text, special=True), EOS]


def turn_by_turn(*texts: str) -> Script:
    """Says the text that belongs to the number of tool results in the prompt."""
    ids = TOKENIZER.encode("<tool_result>")

    def script(request: EngineRequest) -> list[int]:
        prompt: list[Any] = request.prompt_ids
        done = sum(prompt[i : i + len(ids)] == ids for i in range(len(prompt)))
        return [*TOKENIZER.encode(texts[done], special=True), EOS]

    return script
