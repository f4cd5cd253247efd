"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import Request, Response

from abyssal.engine.request import check_ids
from abyssal.errors import RequestError
from abyssal.serve.body import read_body
from abyssal.serve.chat_completions import conversation_of
from abyssal.serve.context import Server, server_of
from abyssal.serve.schemas import DetokenizeBody, TokenizeBody
from abyssal.serve.streams import in_thread, json_response


async def tokenize(request: Request) -> Response:
    """Ids of a raw prompt or of a conversation, exactly as the generating routes make them."""
    server = server_of(request)
    body = await read_body(request, TokenizeBody)
    server.require_model(body.model)
    ids = await in_thread(request.receive, _ids, server, body)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": server.client.info.max_model_len})


def _ids(server: Server, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give prompt or messages, one of them", param="prompt")
    if body.prompt is None:
        if body.add_special_tokens is not None:
            raise RequestError("add_special_tokens goes with prompt; a conversation has its own", param="add_special_tokens")
        return server.chat.encode(server.require_tokenizer("messages"), conversation_of(server, body))
    return server.require_tokenizer("prompt").encode_prompt(body.prompt, body.add_special_tokens is not False)


async def detokenize(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, DetokenizeBody)
    server.require_model(body.model)
    return json_response({"prompt": await in_thread(request.receive, _text, server, body)})


def _text(server: Server, body: DetokenizeBody) -> str:
    if body.tokens is None:
        raise RequestError("tokens is missing", param="tokens")
    check_ids("tokens", body.tokens, server.client.info.vocab_size)
    return server.require_tokenizer("tokens").decode(body.tokens, skip_special_tokens=False)
