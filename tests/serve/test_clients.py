"""The official clients run a loop of two tools against the server, streaming and not: openai, anthropic and openai-agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import agents
import anthropic
import httpx2
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

from tests.serve.sampling import SamplingClient, turn_by_turn
from tests.serve.scripted import MODEL, app_of, openai_client

agents.set_tracing_disabled(True)

ASKED = "What is the weather where I am?"


def call(name: str, **arguments: Any) -> str:
    parameters = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n{parameters}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


TURNS = (
    f"First, where?</think>Let me see.\n\n{call('locate')}",
    f"Now the weather.</think>{call('weather', city='Köln', days=2)}",
    "Good.</think>It rains in Köln.",
)
THOUGHTS = ["First, where?", "Now the weather.", "Good."]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}


def use(name: str, arguments: dict[str, Any]) -> str:
    """The tools."""
    if name == "locate":
        assert arguments == {}
        return "Köln"
    assert (name, arguments) == ("weather", {"city": "Köln", "days": 2})
    return "rain"


def model() -> SamplingClient:
    return SamplingClient(turn_by_turn(*TURNS))


def check(client: SamplingClient) -> None:
    """Three turns, each prompt beginning with the one before and what was answered: nothing of it was lost or changed."""
    first, second, third = (request.prompt_ids for request in client.requests)
    assert second[: len(first)] == first and third[: len(second)] == second


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_completions(stream: bool, strict: bool) -> None:
    client = model()
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in (("locate", NOTHING), ("weather", WEATHER))
    ]

    async def main() -> None:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        thoughts = []
        async with openai_client(app_of(client, checkpoint_thinks=True)) as openai:
            for _ in range(3):
                if stream:
                    async with openai.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as events:
                        answer = await events.get_final_completion()
                else:
                    answer = await openai.chat.completions.create(model=MODEL, messages=messages, tools=tools)
                choice = answer.choices[0]
                thoughts.append(choice.message.reasoning_content)  # type: ignore[union-attr]
                messages.append(choice.message.model_dump(exclude_none=True) if not stream else plain(choice.message))
                for made in choice.message.tool_calls or []:
                    result = use(made.function.name, json.loads(made.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
                assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
        assert thoughts == THOUGHTS and messages[-1]["content"] == "It rains in Köln."

    run(main)
    check(client)


def plain(message: Any) -> dict[str, Any]:
    """A streamed message without what the client's own parser adds."""
    shown = message.model_dump(exclude_none=True, exclude={"parsed"})
    for made in shown.get("tool_calls", []):
        made["function"].pop("parsed_arguments", None)
    return shown


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(stream: bool) -> None:
    client = model()
    tools: list[Any] = [
        {"type": "function", "name": name, "parameters": schema, "strict": True}
        for name, schema in (("locate", NOTHING), ("weather", WEATHER))
    ]

    async def main() -> None:
        items: list[Any] = [{"role": "user", "content": ASKED}]
        async with openai_client(app_of(client, checkpoint_thinks=True)) as openai:
            for thought in THOUGHTS:
                if stream:
                    async with openai.responses.stream(model=MODEL, input=items, tools=tools) as events:
                        seen = [event.type async for event in events]
                        answer: Any = await events.get_final_response()
                    assert seen[0] == "response.created" and seen[-1] == "response.completed"
                else:
                    answer = await openai.responses.create(model=MODEL, input=items, tools=tools)
                assert [item.content[0].text for item in answer.output if item.type == "reasoning"] == [thought]
                items += [clean(item) for item in answer.output]
                for item in answer.output:
                    if item.type == "function_call":
                        result = use(item.name, json.loads(item.arguments))
                        items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
            assert answer.output_text == "It rains in Köln." and answer.status == "completed"

    run(main)
    check(client)


def clean(item: Any) -> dict[str, Any]:
    """An item without what the client's own parser adds."""
    shown = item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
    for part in shown.get("content", []):
        part.pop("parsed", None)
    return shown


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(stream: bool) -> None:
    client = model()
    tools: list[Any] = [
        {"name": "locate", "input_schema": NOTHING},
        {"name": "weather", "description": "W", "input_schema": WEATHER},
    ]

    async def main() -> None:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(client)), base_url="http://test")  # type: ignore[arg-type]
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 500,
            "tools": tools,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        async with anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=http, max_retries=0) as api:
            for thought in THOUGHTS:
                if stream:
                    async with api.messages.stream(messages=messages, **asked) as events:
                        text = "".join([piece async for piece in events.text_stream])
                        answer = await events.get_final_message()
                    assert text == "".join(block.text for block in answer.content if block.type == "text")
                else:
                    answer = await api.messages.create(messages=messages, **asked)
                assert [block.thinking for block in answer.content if block.type == "thinking"] == [thought]
                assert answer.usage.output_tokens > 0 and answer.usage.input_tokens > 0
                messages.append(
                    {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}
                )
                calls: list[Any] = [block for block in answer.content if block.type == "tool_use"]
                assert answer.stop_reason == ("tool_use" if calls else "end_turn")
                results = [{"type": "tool_result", "tool_use_id": c.id, "content": use(c.name, dict(c.input))} for c in calls]
                messages += [{"role": "user", "content": results}] * bool(results)
        assert answer.content[-1].text == "It rains in Köln."  # type: ignore[union-attr]

    run(main)
    check(client)


@function_tool
def locate() -> str:
    """Where the user is."""
    return use("locate", {})


@function_tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return use("weather", {"city": city, "days": days})


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents(kind: Any, stream: bool) -> None:
    """A whole run, which one broken call would end."""
    client = model()

    async def main() -> None:
        api = openai_client(app_of(client, checkpoint_thinks=True))
        agent = Agent(name="A", instructions="Be brief.", tools=[locate, weather], model=kind(model=MODEL, openai_client=api))
        if stream:
            result: Any = Runner.run_streamed(agent, ASKED)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, ASKED)
        assert result.final_output == "It rains in Köln."

    run(main)
    assert len(client.requests) == 3
