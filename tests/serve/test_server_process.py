"""`abyssal serve` as its users have it: a process, the openai client, questions about a long text."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from torch import Tensor

from tests.serve.live import MODEL, until
from tests.serve.process import KEY, Process, check_clean, start
from tests.serve.scripted import TOKENIZER

HARBOR = [{"role": "user", "content": "Define harbor."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    process = start()
    yield process
    engine = process.engine()
    process.press(signal.SIGINT)
    check_clean(process, engine)


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def test_the_greeting_names_all_one_needs(server: Process) -> None:
    until(lambda: f"curl {server.url}/v1/chat/completions" in server.output, "the last line of the greeting")
    assert "up to 4096 tokens" in server.output
    assert KEY not in server.output


def test_the_openai_client_reads_an_answer_and_the_stream_says_the_same(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(model=MODEL, messages=HARBOR, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    text = whole.choices[0].message.content
    assert text and re.search(r"[a-z]{3}", text) and whole.choices[0].finish_reason in ("stop", "length")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HARBOR,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == whole.usage and whole.usage is not None and whole.usage.prompt_tokens > 4


def test_a_wrong_key_is_refused(server: Process) -> None:
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{server.url}/v1", api_key="no") as stranger:
        stranger.models.list()
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_questions_about_a_long_document(client: openai.OpenAI, recall: Callable[[int], list[dict[str, Tensor]]]) -> None:
    """Eight facts stand in 2,048 tokens of text; each is asked for in a request of its own, as a user would. The text is cut into
    tokens a little otherwise than in training, which may cost one answer. The last is asked streamed too."""
    tokenizer, document = TOKENIZER, recall(2048)[0]
    ids, questions = document["input_ids"].tolist(), document["question_at"].tolist()
    text = tokenizer.decode(ids[2 : questions[0]])  # after BOS and the user's mark
    right = 0
    for question, answer, digits in zip(questions, document["answer_at"].tolist(), document["digits"].tolist(), strict=True):
        asked = [{"role": "user", "content": text + tokenizer.decode(ids[question : answer - 1])}]
        options = {"model": MODEL, "messages": asked, "temperature": 0, "max_tokens": 6}
        whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
        content = whole.choices[0].message.content
        right += content == tokenizer.decode(digits)
    assert right >= 7
    stream = client.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == content
