"""The way of every conversation from its API to the engine: prompt, grammar, job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from abyssal.engine.output import CompletionOutput
from abyssal.engine.request import Grammar, RequestUpdate, SamplingParams
from abyssal.errors import RequestError
from abyssal.serve.answer import ChatDelta, ChatProcessor, Part, add_part
from abyssal.serve.context import Server
from abyssal.serve.conversation import Conversation
from abyssal.serve.generation import Job
from abyssal.serve.streams import Receive, while_connected
from abyssal.serve.structure import Format, answer_format
from abyssal.tokenizer import DSML, END_THINK, THINK


class ChatJob(Job[ChatDelta]):
    """n answers to one conversation."""

    def __init__(
        self,
        server: Server,
        conversation: Conversation,
        ids: list[int],
        params: SamplingParams,
        cache_salt: str | None,
        grammar: Grammar | None,
    ) -> None:
        super().__init__(server, [ids], params, cache_salt, grammar)
        self.conversation = conversation
        self.tokenizer = server.require_tokenizer("messages")
        self._processors = [ChatProcessor(self.tokenizer, params, ids, conversation) for _ in self.requests]
        self.outputs = [CompletionOutput(i) for i in range(len(self.requests))]
        self.parts: list[list[Part]] = [[] for _ in self.requests]  # of each output, in their order
        self.reasoning_tokens = 0

    def push(self, index: int, update: RequestUpdate) -> ChatDelta:
        delta = self._processors[index].push(update)
        self.outputs[index].add(delta)
        for part in delta.parts:
            add_part(self.parts[index], part)
        self.reasoning_tokens += delta.num_reasoning_tokens
        return delta


async def start_chat(
    receive: Receive,
    server: Server,
    conversation_of: Callable[[], Conversation],
    params: SamplingParams,
    where: str = "messages",
    cache_salt: str | None = None,
) -> ChatJob:
    """The job of a conversation, checked as far as that is possible before the engine has it.

    Args:
        conversation_of: checks the request and gives the conversation; called in a thread, since a long one takes seconds.
        where: the request's field that holds the messages.

    Raises:
        RequestError: it cannot be served as asked.
        ClientLeft: the client did.
    """
    try:
        return await while_connected(receive, _start(server, conversation_of, params, cache_salt))
    except RequestError as error:
        error.param = where if error.param in ("prompt", "messages") else error.param
        raise


async def _start(
    server: Server, conversation_of: Callable[[], Conversation], params: SamplingParams, cache_salt: str | None
) -> ChatJob:
    conversation, ids, tag = await asyncio.to_thread(_prepare, server, conversation_of)
    grammar = await _grammar(server, conversation, ids, tag)
    return await asyncio.to_thread(ChatJob, server, conversation, ids, params, cache_salt, grammar)


def _prepare(server: Server, conversation_of: Callable[[], Conversation]) -> tuple[Conversation, list[int], Format | None]:
    """(conversation, prompt, what the answer must follow)."""
    conversation = conversation_of()
    tokenizer = server.require_tokenizer("messages")
    ids = server.chat.encode(tokenizer, conversation)
    try:
        return conversation, ids, answer_format(conversation, server.chat.release, tokenizer.find_special(DSML))
    except RecursionError as error:
        where = _schema_field(conversation)
        raise RequestError(f"{where}: a schema holds something that is nested too deeply", param=where) from error


async def _grammar(server: Server, conversation: Conversation, ids: list[int], tag: Format | None) -> Grammar | None:
    if tag is None:
        return None
    tokenizer = server.require_tokenizer("messages")
    key, compiled = await server.grammars.compile(tag, _schema_field(conversation))
    thinks = ids[-1] == tokenizer.find_special(THINK)
    return Grammar(key, compiled, after=tokenizer.special_id(END_THINK) if thinks else None)


def _schema_field(conversation: Conversation) -> str:
    return "tools" if conversation.response_format is None else conversation.response_format.where
