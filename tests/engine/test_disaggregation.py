"""A prefill and a decode engine give what one engine gives, and move what the planner says, while the prompt is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import RequestPart
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from abyssal.errors import EngineDeadError, RequestError
from abyssal.kv.planner import layer_bytes, sequence_cost
from tests.engine.disaggregated import DECODE, PREFILL, Pair, Served, pair
from tests.engine.test_link import needs_nixl
from tests.support.families import write_small

OPTIONS = {"kv_cache_bytes": 64 << 20, "max_num_batched_tokens": 256, "max_num_seqs": 4, "max_model_len": 2048}
PATIENCE = 120.0  # seconds for what should take a moment
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


def sizes(both: Pair, part: RequestPart) -> list[int]:
    """Bytes of each layer."""
    return layer_bytes(both.decode.runner.plan, part.start, part.end, part.last)


def params(**more: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 9, "ignore_eos": True} | more))


def assert_layers_leave_one_by_one(both: Pair) -> None:
    """Before the last layer of the last chunk is computed, all others have arrived, and nothing waits for it but its own bytes."""
    request = EngineRequest("layers", IDS[950:350:-1], params())
    expected = one_engine(both.model, [request])["layers"]
    both.add(request)
    both.step(prefill=False)  # pages are taken
    before = both.bytes_sent
    both.step()
    both.step()
    both.begin_step(layer=len(both.decode.runner.model.blocks) - 1)
    (*_, last) = both.parts
    assert (last.start, last.end, last.last) == (512, 600, True)
    arrival = both.decode._moving["layers"].arrivals[-1]
    for future in arrival.futures[:-1]:
        future.result(PATIENCE)
    assert not arrival.futures[-1].done()
    early = both.bytes_sent - before + sum(sizes(both, last)[:-1])
    assert early + sizes(both, last)[-1] == payload(both, 600) and sizes(both, last)[-1] > 0
    both.finish_step()
    assert both.bytes_sent - before == payload(both, 600)
    both.finish("layers")
    assert both.tokens("layers") == expected
    assert_drained(both)


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
        assert {part.request_id: part.end for part in both.parts if part.last} == handed
        assert both.bytes_sent == sum(payload(both, tokens) for tokens in handed.values())
        assert "first only" not in {part.request_id for part in both.parts}
        both.decode.abort("first only")  # it has ended with its first token, which its decode engine cannot know
        assert_drained(both)
        if model == "v41":
            assert_layers_leave_one_by_one(both)


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


@needs_nixl
def test_over_nixl_layers_leave_one_by_one_too(tmp_path: Path) -> None:
    model = write_small("v4", tmp_path / "model", seed=3)
    with pair(tmp_path, model, backend="nixl", **OPTIONS) as both:
        assert_layers_leave_one_by_one(both)


ONE_AT_A_TIME = {"kv_cache_bytes": 400 << 10, "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 768}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small("v4", tmp_path_factory.mktemp("model"), seed=3)


def assert_all_are_served(both: Served, model: Path, requests: list[EngineRequest]) -> None:
    both.run()
    for request in requests:
        expected = one_engine(model, [request])[request.request_id]
        assert both.tokens(request.request_id) == expected and both.updates[request.request_id][-1].finish_reason == "length"
    assert not both.prefill.has_unfinished() and not both.decode.has_unfinished()


def one_decoding_beside_one_with_reserved_pages(both: Served) -> list[EngineRequest]:
    """`grows` has tokens, and pages are reserved for the longer `reserved`, whose prompt is still to come."""
    grows, reserved = EngineRequest("grows", IDS[:240], params(max_tokens=40)), EngineRequest("reserved", IDS[:450], params())
    both.add(grows)
    while len(both.updates["grows"]) < 3:
        both.turn(PREFILL)
        both.turn(DECODE)
    both.add(reserved)
    return [grows, reserved]


def test_a_sequence_waits_for_pages_that_are_reserved_for_another(model: Path) -> None:
    """It grows while the other's prompt is still to come, until pages are short."""
    both = Served(model, ONE_AT_A_TIME | {"kv_cache_bytes": 64 << 20}, ONE_AT_A_TIME)
    requests = one_decoding_beside_one_with_reserved_pages(both)
    while both.turn(DECODE):
        pass
    assert 3 < len(both.updates["grows"]) < 40 and both.decode.stats().num_preemptions == 1
    assert_all_are_served(both, model, requests)


def test_a_sequence_whose_step_ran_out_of_memory_goes_on_while_pages_are_reserved(model: Path) -> None:
    """It waits beside nobody, but not for pages: no message needs to come."""
    roomy = ONE_AT_A_TIME | {"kv_cache_bytes": 64 << 20}
    both = Served(model, roomy, roomy)
    requests = one_decoding_beside_one_with_reserved_pages(both)
    block = both.decode.runner.model.blocks[2]
    attention = block.attention

    def once(*arguments: Any) -> Any:
        block.attention = attention
        raise torch.OutOfMemoryError("CUDA out of memory (planted)")

    block.attention = once
    while both.turn(DECODE):
        pass
    assert both.decode.stats().num_preemptions == 1 and both.updates["grows"][-1].finish_reason == "length"
    assert_all_are_served(both, model, requests)


@pytest.mark.parametrize("tight", ["decode", "prefill", "both"])
def test_a_prompt_for_which_there_is_no_room_is_served_when_another_has_ended(tight: str, model: Path) -> None:
    """Nothing but the engine itself knows that it has ended: no message wakes its process."""
    roomy = ONE_AT_A_TIME | {"kv_cache_bytes": 64 << 20}
    prefill = roomy if tight == "decode" else ONE_AT_A_TIME
    decode = roomy | {"max_num_seqs": 1} if tight == "prefill" else ONE_AT_A_TIME
    both = Served(model, prefill, decode)
    max_tokens = 40 if tight == "both" else 5  # 40: a computed prompt waits for pages here, and the next one for its own
    requests = [EngineRequest(str(i), IDS[i : i + 600], params(max_tokens=max_tokens)) for i in range(3)]
    for request in requests:
        both.add(request)
    assert_all_are_served(both, model, requests)


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
        sent = small.parts[begin:]
        assert [(p.start, p.end, p.last) for p in sent[chunk:]] == [(256 * chunk, min(256 * (chunk + 1), 1000), chunk == 3)]
        assert small.bytes_sent - before == sum(sum(sizes(small, part)) for part in sent)
    assert small.bytes_sent - before == payload(small, 1000)
    small.finish("chunks")
    assert_drained(small)


def test_layers_travel_while_the_last_chunk_is_computed(small: Pair) -> None:
    """The same in V4.1, whose compressed entries a few layers own, above."""
    assert_layers_leave_one_by_one(small)


def test_known_blocks_are_not_sent_again(small: Pair) -> None:
    small.add(EngineRequest("first", IDS[100:1000], params()))
    small.finish("first")
    before, again = small.bytes_sent, EngineRequest("again", [*IDS[100:1000], 5, 6, 7], params())
    small.add(again)
    small.finish("again")
    assert small.bytes_sent - before == sum(layer_bytes(small.decode.runner.plan, 768, 903, True))
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


def test_a_request_aborted_between_two_layers_gives_its_pages_back_on_both_sides(small: Pair) -> None:
    small.add(EngineRequest("between", IDS[900:0:-1], params(max_tokens=50)))
    small.step(prefill=False)
    small.begin_step(layer=2)
    assert small.decode._moving["between"].arrivals
    small.decode.abort("between")  # its pages are another's while the rest of its part is still to come
    stats = small.decode.stats()
    assert stats.pages_free == stats.pages_total
    small.finish_step()
    small.prefill("abort", "between")
    other = EngineRequest("beside", IDS[700:40:-1], params())
    small.add(other)
    small.finish("beside")
    assert small.tokens("beside") == one_engine(small.model, [other])["beside"]
    assert_drained(small)


@pytest.mark.parametrize("requests", [1, 2])
def test_a_part_whose_step_fails_comes_again(requests: int, small: Pair) -> None:
    """Of two sequences both are computed again; one alone ends. What was announced has arrived all the same, so the link stays in step."""
    both = [EngineRequest(f"fails {requests} {i}", IDS[i + 11 * requests : 110 + i], params()) for i in range(requests)]
    after = EngineRequest(f"after {requests}", IDS[30:400], params())
    expected = one_engine(small.model, [*both, after])
    for request in both:
        small.add(request)
    small.step(prefill=False)
    begin = len(small.parts)
    small.prefill("before_layer", 2, True)
    small.step()
    announced = [part.request_id for part in small.parts[begin:]]
    assert announced == [request.request_id for request in both] * requests
    small.add(after)
    if requests == 1:
        assert "broken on purpose" in (small.updates[both[0].request_id][-1].error or "")
        small.decode.abort(both.pop().request_id)  # as the front does
    names = [request.request_id for request in [*both, after]]
    small.finish(*names)
    assert {name: small.tokens(name) for name in names} == {name: expected[name] for name in names}
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


def test_when_the_prefill_engine_is_killed_between_two_layers_the_decode_engine_ends(small: Pair) -> None:
    """Last in this file: the pair is of no use afterwards."""
    small.add(EngineRequest("killed", IDS[1300:600:-1], params()))
    small.step(prefill=False)
    small.begin_step(layer=2)
    small.process.kill()
    assert small.decode._moving["killed"].arrivals[0].futures[-1].exception(PATIENCE) is not None
    with pytest.raises(EngineDeadError, match="the link to engine 0 broke"):
        small.decode.step()
