"""Masks of grammars in the engine: what ends by itself follows its schema; thinking first; preemption; nothing of it in other requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, Grammar, RequestUpdate, SamplingParams
from abyssal.errors import RequestError
from tests.serve.scripted import TOKENIZER
from tests.support.grammars import EOS, MASKS, VOCAB, json_grammar

END_THINK, DSML = 7, 8
SHORT = {"type": "string", "maxLength": 8}


def strict(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


POINT = strict(x={"type": "integer", "minimum": -99, "maximum": 99}, y={"type": "integer", "minimum": -99, "maximum": 99})
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": strict(label={"enum": ["a", "b"]}, child={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
}
SCHEMAS: dict[str, Any] = {
    "point": POINT,
    "list of points": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3},
    "tree": TREE,
    "person": strict(name=SHORT, address=strict(street=SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"})),
    "alternatives": {"anyOf": [strict(kind={"const": "a"}, n={"type": "boolean"}), strict(kind={"const": "b"}, s=SHORT)]},
    "optional": {"type": "object", "properties": {"a": SHORT, "b": POINT}, "required": ["b"], "additionalProperties": False},
    "matrix": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"enum": [1, "one", None]}, strict(deep=POINT)], "items": False, "minItems": 2},
    "numbers": strict(i={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}, f={"type": "number", "minimum": 0, "maximum": 9}),
    "nullable": strict(a={"type": ["string", "null"], "maxLength": 4}, b={"type": ["boolean", "integer"], "minimum": 0, "maximum": 9}),
    "table": {"type": "object", "additionalProperties": POINT, "propertyNames": {"type": "string", "pattern": "^[a-c]$"}, "maxProperties": 2},
    "discriminated": {"oneOf": [strict(type={"const": "dot"}, at=POINT), strict(type={"const": "text"}, text={"enum": ["é", '"', "\n"]})]},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield Engine(EngineConfig(kv_cache_bytes=256 << 20, num_threads=1, device="cpu"))


def run(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[RequestUpdate]]:
    for request in requests:
        engine.add(request)
    updates: dict[str, list[RequestUpdate]] = {request.request_id: [] for request in requests}
    while engine.has_unfinished():
        for update in engine.step():
            updates[update.request_id].append(update)
    return updates


def tokens(updates: list[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def text(updates: list[RequestUpdate]) -> str:
    return TOKENIZER.decode(tokens(updates), skip_special_tokens=True)


def sampled(engine: Engine, count: int, max_tokens: int) -> int:
    """Ask for `count` answers at temperature 1.5 over all schemas; all that end by themselves must validate. How many do."""
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(count)]
    requests = [
        EngineRequest(str(i), [0, 3, 50 + i, 4, 7], SamplingParams(temperature=1.5, seed=i, max_tokens=max_tokens), grammar=json_grammar(SCHEMAS[name]))
        for i, name in enumerate(names)
    ]  # fmt: skip
    ended = 0
    for (_, updates), name in zip(run(engine, requests).items(), names, strict=True):
        if updates[-1].finish_reason == "stop":
            ended += 1
            answer = json.loads(text(updates))
            jsonschema.Draft202012Validator(SCHEMAS[name]).validate(answer)
        else:
            assert updates[-1].finish_reason == "length", updates[-1].error
    return ended


def test_answers_that_end_follow_their_schema(engine: Engine) -> None:
    assert sampled(engine, 12, 60) > 1


@pytest.mark.long
def test_two_hundred_answers_follow_their_schemas(engine: Engine) -> None:
    ended = sampled(engine, 200, 300)
    assert ended > 150, ended


def test_thinking_is_free_and_the_grammar_begins_after_it(engine: Engine) -> None:
    """Before `</think>` no other control token and no end; tiny-v4 never closes its thoughts, so a bias does."""
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=30)
    (free,) = run(engine, [EngineRequest("a", [0, 3, 60, 4, 6], params, grammar=json_grammar(POINT, END_THINK))]).values()
    assert free[-1].finish_reason == "length" and not set(tokens(free)) & {i for i in range(9) if i != END_THINK}
    pushed = SamplingParams(temperature=1.0, seed=1, max_tokens=120, logit_bias={END_THINK: 100.0})
    colour = strict(colour={"enum": ["red", "blue"]})
    (updates,) = run(engine, [EngineRequest("b", [0, 3, 60, 4, 6], pushed, grammar=json_grammar(colour, END_THINK))]).values()
    ids = tokens(updates)
    place = ids.index(END_THINK)
    assert updates[-1].finish_reason == "stop" and ids.count(END_THINK) == 1
    jsonschema.validate(json.loads(TOKENIZER.decode(ids[place + 1 : -1])), colour)


def test_requests_with_and_without_a_grammar_share_a_batch(engine: Engine) -> None:
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=12)
    alone = tokens(run(engine, [EngineRequest("x", [0, 3, 70, 4, 7], plain)])["x"])
    both = run(
        engine,
        [EngineRequest("x", [0, 3, 70, 4, 7], plain), EngineRequest("y", [0, 3, 70, 4, 7], plain, grammar=json_grammar(POINT))],
    )
    assert tokens(both["x"]) == alone and text(both["y"]).lstrip().startswith("{")


def test_a_paused_request_keeps_its_place_in_the_grammar() -> None:
    """Recomputation does not feed the grammar a second time."""
    engine = Engine(EngineConfig(kv_cache_bytes=256 << 20, num_threads=1, device="cpu", max_num_seqs=2))
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=120)
    schema = SCHEMAS["list of points"]
    whole = tokens(run(engine, [EngineRequest("a", [0, 3, 60, 4, 7], params, grammar=json_grammar(schema))])["a"])
    engine.add(EngineRequest("b", [0, 3, 60, 4, 7], params, grammar=json_grammar(schema)))
    again: list[int] = []
    while engine.has_unfinished():
        again += [token for update in engine.step() for token in update.token_ids]
        if engine.scheduler.running and len(again) in (3, 7):
            engine.scheduler.preempt(engine.scheduler.running[0])
    assert again == whole and engine.scheduler.num_preemptions >= 2


def test_l17_one_legal_token_has_finite_log_probabilities(engine: Engine) -> None:
    """A grammar that leaves no choice: the values are the model's own, and finite."""
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=5)
    (updates,) = run(engine, [EngineRequest("a", [0, 3, 60, 4, 7], params, grammar=json_grammar({"const": "only"}))]).values()
    assert text(updates) == '"only"' and updates[-1].finish_reason == "stop"
    scores = [score for update in updates for score in update.logprobs or []]
    assert scores and all(-9999.0 <= value <= 0 for score in scores for value in (score.logprob, *score.top_logprobs))


@pytest.mark.parametrize(("name", "value"), [("ignore_eos", True), ("min_tokens", 3)])
def test_options_that_contradict_a_grammar_are_refused(engine: Engine, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="structured output") as caught:
        engine.add(EngineRequest("a", [0, 3], SamplingParams(**{name: value}), grammar=json_grammar(POINT)))
    assert caught.value.param == name and not engine.has_unfinished()


def test_a_mask_allows_no_control_token_and_no_padding() -> None:
    """Free text, a grammar that takes any text, and ids beyond the tokenizer."""
    for mask in (MASKS.mask(json_grammar({"type": "string"})), MASKS.mask(json_grammar({"type": "string"}, END_THINK))):
        for token in (None, *TOKENIZER.encode('"a')):
            if token is not None and mask._before is None:
                mask.append(token)
            row = torch.zeros(VOCAB)
            mask.apply(row)
            allowed = set(row.isfinite().nonzero().flatten().tolist())
            assert not allowed & (set(range(9)) - {END_THINK}) and allowed
            assert (END_THINK in allowed) == (mask._before is not None) and EOS not in allowed and DSML not in allowed


def test_equal_grammars_are_read_once() -> None:
    grammar = json_grammar({"const": "read once"})
    MASKS.mask(grammar)
    before = MASKS._compiled[grammar.key]
    MASKS.mask(grammar)
    assert MASKS._compiled[grammar.key] is before and list(MASKS._compiled)[-1] == grammar.key


def test_a_grammar_of_another_vocabulary_is_refused(engine: Engine) -> None:
    """By its request alone: the engine goes on."""
    bad = Grammar("bad", json_grammar(POINT).compiled.replace(b'"vocab_size":4096', b'"vocab_size":4097'))
    for grammar in (bad, Grammar("none", b""), Grammar("nonsense", b"[]")):
        with pytest.raises(RequestError, match="cannot be used"):
            engine.add(EngineRequest("a", [0, 3], SamplingParams(), grammar=grammar))
    assert not engine.has_unfinished()
