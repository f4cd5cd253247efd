"""A prefill and a decode engine give what one engine gives, and move what the planner says, while the prompt is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.errors import RequestError
from abyssal.kv.planner import part_bytes, sequence_cost
from tests.engine.disaggregated import Pair, pair
from tests.support.families import write_small

OPTIONS = {"kv_cache_bytes": 64 << 20, "max_num_batched_tokens": 256, "max_num_seqs": 4, "max_model_len": 2048}
IDS = random.Random(4).choices(range(2, 160), k=1400)


def one_engine(model: str | Path, requests: list[EngineRequest], **options: object) -> dict[str, list[int]]:
    """Tokens of each request, computed by one engine."""
    engine = Engine(EngineConfig(model=str(model), device="cpu", **(OPTIONS | options)))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_unfinished():
        for update in engine.step():
            assert update.error is None
            tokens[update.request_id] += update.token_ids
    return tokens


def assert_drained(both: Pair) -> None:
    both.step()
    stats = both.decode.stats()
    assert both.prefill_is_drained and stats.pages_free == stats.pages_total
    assert not both.decode.has_unfinished() and both.decode.poll_ms() is None


def payload(both: Pair, tokens: int) -> int:
    return sum(cost.payload for cost in sequence_cost(both.decode.runner.plan, tokens))


def params(**more: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 9, "ignore_eos": True} | more))


REQUESTS = [
    EngineRequest("long", IDS[:700], params()),
    EngineRequest("drawn", IDS[200:330], params(temperature=0.9, seed=5, frequency_penalty=0.4, max_tokens=12)),
    EngineRequest("block", IDS[300:812], params(max_tokens=3)),  # two blocks to the token
    EngineRequest("short", IDS[7:10], params()),
    EngineRequest("one", IDS[:1], params(max_tokens=3)),
    EngineRequest("first only", IDS[500:600], params(max_tokens=1)),
]


@pytest.mark.parametrize("model", ["v41", "tiny"])
def test_two_engines_give_the_tokens_of_one_and_move_the_bytes_of_the_plan(model: str, tmp_path: Path) -> None:
    folder = "tiny" if model == "tiny" else write_small(model, tmp_path / "model", seed=3)
    expected = one_engine(folder, REQUESTS)
    with pair(tmp_path, folder, **OPTIONS) as both:
        for request in REQUESTS:
            both.add(request)
        both.finish(*expected)
        assert {name: both.tokens(name) for name in expected} == expected
        handed = {request.request_id: len(request.prompt_ids) for request in REQUESTS if request.params.max_tokens > 1}
        assert {part.request_id: part.end for part in both.parts if part.part.last} == handed
        begun = [part for part in both.parts if part.request_id == "first only"]
        extra = sum(part_bytes(both.decode.runner.plan, part.start, part.end, False) for part in begun)
        assert both.bytes_sent == sum(payload(both, tokens) for tokens in handed.values()) + extra
        both.decode.abort("first only")  # it has ended with its first token, which its decode engine cannot know
        assert_drained(both)


TIGHT = 1 << 20


@pytest.mark.parametrize("tight", ["decode", "prefill"])
def test_full_engines_let_prompts_wait_and_all_finish(tight: str, tmp_path: Path) -> None:
    """In one case the decode engine has few pages; in the other one slot only, so that computed prompts fill the prefill engine."""
    model = write_small("v4", tmp_path / "model", seed=3)
    requests = [EngineRequest(str(i), IDS[i : i + 900], params()) for i in range(4)]
    expected = one_engine(model, requests)
    decode = {"kv_cache_bytes": TIGHT} if tight == "decode" else {"max_num_seqs": 1}
    prefill = {"kv_cache_bytes": TIGHT} if tight == "prefill" else {}
    with pair(tmp_path, model, OPTIONS | decode, **(OPTIONS | prefill)) as both:
        for request in requests:
            both.add(request)
        at_once = 0
        while sum(both.updates[name][-1].finish_reason is not None for name in expected if both.updates[name]) < len(expected):
            both.step()
            waiting = sum(not incoming.is_reserved for incoming in both.decode._moving.values())
            at_once = max(at_once, len(both.decode.scheduler.running) + len(both.decode._moving) - waiting)
            assert len(both.decode.scheduler.running) <= both.decode.config.max_num_seqs
        assert at_once < 4, "it was tight"
        assert {name: both.tokens(name) for name in expected} == expected
        assert_drained(both)


# From here on one pair serves all tests; a process can be in one pair at a time.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One pair for tests that leave nothing behind; no two share a prompt."""
    folder = write_small("v4", tmp_path_factory.mktemp("model"), seed=3)
    with pair(tmp_path_factory.mktemp("pair"), folder, **OPTIONS) as both:
        yield both


def test_finished_chunks_travel_while_the_prompt_is_computed(small: Pair) -> None:
    small.add(EngineRequest("chunks", IDS[:1000], params()))
    small.step(prefill=False)  # pages are taken
    begin, before = len(small.parts), small.bytes_sent
    for chunk in range(4):
        assert not small.updates["chunks"]
        small.step()
        sent = [(part.start, part.end, part.part.last) for part in small.parts[begin:]]
        assert sent[chunk:] == [(256 * chunk, min(256 * (chunk + 1), 1000), chunk == 3)]
    plan = small.decode.runner.plan
    sizes = [part_bytes(plan, start, end, last) for start, end, last in sent]
    assert sum(sizes) == small.bytes_sent - before == payload(small, 1000)
    small.finish("chunks")
    assert_drained(small)


def test_known_blocks_are_not_sent_again(small: Pair) -> None:
    small.add(EngineRequest("first", IDS[100:1000], params()))
    small.finish("first")
    before, again = small.bytes_sent, EngineRequest("again", [*IDS[100:1000], 5, 6, 7], params())
    small.add(again)
    small.finish("again")
    assert small.bytes_sent - before == part_bytes(small.decode.runner.plan, 768, 903, True)
    assert small.updates["again"][0].num_cached_tokens == 768
    assert small.tokens("again") == one_engine(small.model, [again])["again"]
    assert_drained(small)


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 6])
def test_an_aborted_request_leaves_nothing_behind(small: Pair, steps: int) -> None:
    """Before pages are taken, between parts, after the last one, while it decodes; parts under way are received for nobody."""
    name, first = f"aborted {steps}", 200 + steps
    small.add(EngineRequest(name, IDS[first : first + 1000], params(max_tokens=50)))
    for _ in range(steps):
        small.step()
    small.decode.abort(name)
    small.step()  # the prefill engine has not heard yet
    small.prefill("abort", name)
    other = EngineRequest(f"other {steps}", IDS[first + 50 : first + 700], params())
    small.add(other)
    small.finish(other.request_id)
    assert small.tokens(other.request_id) == one_engine(small.model, [other])[other.request_id]
    assert_drained(small)


def test_what_cannot_be_served_is_refused(small: Pair) -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        small.decode.expect(EngineRequest("refused", [], params()))
    request = EngineRequest("twice", IDS[:300], params())
    small.add(request)
    with pytest.raises(RequestError, match="'twice' is already in use"):
        small.decode.expect(request)
    small.finish("twice")
    assert_drained(small)
