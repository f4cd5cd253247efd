"""The chat protocol of each release: conversations to prompts (V4 spec 5.2 to 5.6, V4.1 spec 7).

A prompt is a list of segments, text and `SpecialToken`, so that what a message spells can never become a control token. Releases
differ in a few facts, held by `Release`, and in their long texts, held by `Texts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from abyssal.errors import CheckpointError
from abyssal.serve.conversation import TASKS, Block, Message, ToolCall, dump_json, parse_arguments
from abyssal.tokenizer import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    SYSTEM,
    THINK,
    USER,
    SpecialToken,
)  # fmt: skip

Segment = str | SpecialToken

TASK_TOKENS = {name: SpecialToken(f"<｜{name}｜>") for name in TASKS}
CONTROL_TOKENS = (BOS, EOS, THINK, END_THINK, DSML, SYSTEM, USER, ASSISTANT, LATEST_REMINDER, *TASK_TOKENS.values())

# Efforts that clients know and a release has no text for mean one that it may have.
EFFORT_ALIASES = {"minimal": "low", "medium": "low", "xhigh": "high"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Release:
    """What tells the releases apart, beside their texts."""

    name: str
    block: str  # tag names, as they follow the DSML token
    invoke: str
    parameter: str
    marks_system: bool  # system messages begin with a control token, and later ones count as user turns
    counts_results: bool  # a turn of tool results alone counts as the user's


V4 = Release("v4", "tool_calls", "invoke", "parameter", marks_system=False, counts_results=True)
V41 = Release("v41", " calls", " invoke", " parameter", marks_system=True, counts_results=False)
RELEASES = {"v4": V4, "v41": V41}


@dataclass(frozen=True, slots=True)
class Texts:
    """The long texts of a release, with their placeholders."""

    tools: str
    response_format: str
    efforts: Mapping[str, str] = field(default_factory=dict)
    default_effort: str | None = None

    def effort(self, name: str | None) -> str:
        """What the prompt says of a reasoning effort; nothing for one that this release has no words for."""
        chosen = name or self.default_effort or ""
        return self.efforts.get(chosen) or self.efforts.get(EFFORT_ALIASES.get(chosen, ""), "")


# For checkpoints that bring neither an encoding file nor a template.
OWN_TEXTS = Texts(
    tools="""Tools are available. To use some, finish the answer with one block like this, an invoke for each call:
<{dsml_token}tool_calls>
<{dsml_token}invoke name="TOOL">
<{dsml_token}parameter name="TEXT_ARGUMENT" string="true">text as it is</{dsml_token}parameter>
<{dsml_token}parameter name="OTHER_ARGUMENT" string="false">JSON</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>
The tools, as JSON:
{tool_schemas}
""",
    response_format="Answer with JSON that follows this schema, and nothing else:\n{schema}",
)


def render(
    messages: Sequence[Message],
    release: Release,
    texts: Texts,
    thinking: bool,
    drop_thinking: bool = True,
    effort: str | None = None,
) -> list[Segment]:
    """The prompt of a conversation.

    Args:
        thinking: thinking mode; the prompt ends with `<think>` then, otherwise with `</think>`.
        drop_thinking: leave out reasoning before the last user turn; never done when a message carries tools.
        effort: reasoning effort, used in thinking mode only; None = the release's default.
    """
    turns = merge_turns(messages)
    drops = drop_thinking and not any(turn.tools for turn in turns)
    if thinking and drops:
        last = _last_user(turns, release)
        turns = [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]
    last_user = _last_user(turns, release)
    effort_text = texts.effort(effort) if thinking else ""
    prompt: list[Segment] = [BOS]
    if release.marks_system and (effort_text or turns[0].role == "system"):
        prompt.append(SYSTEM)
    prompt += control_segments(effort_text)
    for i, turn in enumerate(turns):
        keeps = thinking and (not drops or i >= last_user)  # reasoning stays from here on
        prompt += _opening(turn, i, release)
        if turn.role == "assistant" and keeps and not (i and turns[i - 1].task):
            prompt += [turn.reasoning, END_THINK]
        prompt += _body(turn, release, texts)
        follower = turns[i + 1].role if i + 1 < len(turns) else None
        if follower in (None, "assistant", "latest_reminder"):
            # An action is chosen with thinking open wherever it stands; an answer before the last question was given without.
            thinks = thinking if turn.task == "action" else keeps
            is_question = _is_question(turn, i, release) or (turn.role == "system" and follower is None)
            prompt += _transition(turn, is_question, THINK if thinks else END_THINK)
    return [segment for segment in prompt if segment != ""]


def _opening(turn: Message, index: int, release: Release) -> list[Segment]:
    if turn.role in ("user", "developer"):
        return [USER]
    if turn.role == "latest_reminder":
        return [LATEST_REMINDER]
    return [SYSTEM] if turn.role == "system" and index and release.marks_system else []


def _body(turn: Message, release: Release, texts: Texts) -> list[Segment]:
    """A turn's own text."""
    if turn.role == "user":
        shown = [b.text if b.tool_call_id is None else f"<tool_result>{b.text}</tool_result>" for b in turn.blocks]
        return ["\n\n".join(shown)]
    body: list[Segment] = [turn.content]
    if turn.tools:
        schemas = "\n".join(dump_json(tool.function, "tools") for tool in turn.tools)
        body += ["\n\n", *_fill_tools(texts.tools, schemas)]
    if turn.response_schema is not None:
        schema = dump_json(turn.response_schema, "response_format")
        body += ["\n\n", *fill(texts.response_format, {"schema": schema})]
    if turn.tool_calls:
        body += ["\n\n", *render_calls(turn.tool_calls, release)]
    return [*body, EOS] if turn.role == "assistant" else body


def _transition(turn: Message, is_question: bool, mark: SpecialToken) -> list[Segment]:
    """What opens the next turn."""
    if turn.task is not None and turn.task != "action":
        return [TASK_TOKENS[turn.task]]
    if turn.task == "action":
        return [ASSISTANT, mark, TASK_TOKENS["action"]]
    return [ASSISTANT, mark] if is_question else []


def _is_question(turn: Message, index: int, release: Release) -> bool:
    """Whether the assistant answers it."""
    return turn.role in ("user", "developer") or (release.marks_system and turn.role == "system" and index > 0)


def _last_user(turns: Sequence[Message], release: Release) -> int:
    """Index of the last turn that asks something new; -1 without one."""

    def is_new(i: int, turn: Message) -> bool:
        only_results = turn.role == "user" and all(block.tool_call_id is not None for block in turn.blocks)
        return _is_question(turn, i, release) and (release.counts_results or not only_results)

    return max((i for i, turn in enumerate(turns) if is_new(i, turn)), default=-1)


# Merging


def merge_turns(messages: Sequence[Message]) -> list[Message]:
    """User messages and tool results in a row become one user turn of blocks (V4 spec 5.5).

    A user message does not join a turn that has a task. Results stand in the order of the calls that they answer.
    """
    turns: list[tuple[Message, list[Block]]] = []
    for message in messages:
        if message.role not in ("user", "tool"):
            turns.append((message, []))
            continue
        is_result = message.role == "tool"
        if not turns or turns[-1][0].role != "user" or (turns[-1][0].task is not None and not is_result):
            turns.append((replace(message, role="user", content="", tool_call_id=""), []))
        turns[-1][1].append(Block(message.content, message.tool_call_id if is_result else None))
    merged: list[Message] = []
    order: dict[str, int] = {}
    for turn, blocks in turns:
        if turn.tool_calls:
            order = {call.id: place for place, call in enumerate(turn.tool_calls)}
        merged.append(replace(turn, blocks=_sort_results(blocks, order)) if turn.role == "user" else turn)
    return merged


def _sort_results(blocks: Sequence[Block], order: Mapping[str, int]) -> tuple[Block, ...]:
    """Results by the place of their call, unknown ones as the first; text stays where it is."""
    results = [block for block in blocks if block.tool_call_id is not None]
    ordered = iter(sorted(results, key=lambda block: order.get(block.tool_call_id or "", 0)))
    return tuple(block if block.tool_call_id is None else next(ordered) for block in blocks)


# Tool calls


def render_calls(calls: Sequence[ToolCall], release: Release) -> list[Segment]:
    """The block of an answer's calls (V4 spec 5.6). Text that is not a JSON object becomes one argument named `arguments`."""
    segments: list[Segment] = ["<", DSML, f"{release.block}>"]
    for call in calls:
        segments += ["\n<", DSML, f'{release.invoke} name="{call.name}">\n']
        arguments = parse_arguments(call.arguments)
        for i, (key, value) in enumerate(({"arguments": call.arguments} if arguments is None else arguments).items()):
            text = value if isinstance(value, str) else dump_json(value, "messages")
            kind = "true" if isinstance(value, str) else "false"
            segments += ["\n<" if i else "<", DSML, f'{release.parameter} name="{key}" string="{kind}">{text}</', DSML]
            segments.append(f"{release.parameter}>")
        segments += ["\n</", DSML, f"{release.invoke}>"]
    return [*segments, "\n</", DSML, f"{release.block}>"]


# Texts


def _fill_tools(template: str, schemas: str) -> list[Segment]:
    marks = {"dsml_token": DSML, "thinking_start_token": THINK, "thinking_end_token": END_THINK}
    return fill(template, {**marks, "tool_schemas": schemas})


def fill(template: str, values: Mapping[str, Segment]) -> list[Segment]:
    """A template with its `{name}` filled in and its doubled braces made single. Control tokens count in the template only.

    Raises:
        CheckpointError: the template has a placeholder that `values` has not.
    """
    segments: list[Segment] = []
    literal = ""
    for part in re.split(r"(\{\{|\}\}|\{\w+\})", template):
        if part in ("{{", "}}"):
            literal += part[0]
        elif re.fullmatch(r"\{\w+\}", part):
            if part[1:-1] not in values:
                raise CheckpointError(f"a text of the checkpoint's encoding file has the unknown placeholder {part}")
            segments += [*control_segments(literal), values[part[1:-1]]]
            literal = ""
        else:
            literal += part
    return [*segments, *control_segments(literal)]


_CONTROL_TEXT = re.compile("(" + "|".join(re.escape(token.text) for token in CONTROL_TOKENS) + ")")


def control_segments(text: str) -> list[Segment]:
    """A text of the checkpoint itself, in which control tokens may be spelled out."""
    parts = _CONTROL_TEXT.split(text)
    return [SpecialToken(part) if i % 2 else part for i, part in enumerate(parts) if part]
