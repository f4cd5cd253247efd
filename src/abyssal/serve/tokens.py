"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import Request, Response

from abyssal.engine.request import check_ids
from abyssal.errors import RequestError
from abyssal.serve.body import read_body
from abyssal.serve.chat_completions import conversation_of
from abyssal.serve.chat_job import encode
from abyssal.serve.context import server_of
from abyssal.serve.schemas import DetokenizeBody, TokenizeBody
from abyssal.serve.streams import json_response


async def tokenize(request: Request) -> Response:
    """Ids of a raw prompt or of a conversation, exactly as the generating routes make them."""
    server = server_of(request)
    body = await read_body(request, TokenizeBody)
    server.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give prompt or messages, one of them", param="prompt")
    if body.prompt is None:
        if body.add_special_tokens is not None:
            raise RequestError("add_special_tokens goes with prompt; a conversation has its own", param="add_special_tokens")
        ids = await encode(server, conversation_of(server, body))
    else:
        ids = await server.encode_prompt(body.prompt, body.add_special_tokens is not False)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": server.client.info.max_model_len})


async def detokenize(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, DetokenizeBody)
    server.require_model(body.model)
    if body.tokens is None:
        raise RequestError("tokens is missing", param="tokens")
    check_ids("tokens", body.tokens, server.client.info.vocab_size)
    return json_response({"prompt": server.require_tokenizer("tokens").decode(body.tokens, skip_special_tokens=False)})
