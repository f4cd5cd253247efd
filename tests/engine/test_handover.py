"""A request that moves between engines, at any point of its life, ends as if it had stayed."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, RequestUpdate, SamplingParams
from abyssal.errors import HandOverError, RequestError
from abyssal.kv.handover import HandOver
from abyssal.kv.planner import sequence_cost
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.families import FAMILIES, write_small
from tests.support.small_model import config_dict

PROMPT = random.Random(4).choices(range(2, 160), k=150)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp("small"), seed=3)


def engine(model: str | Path, **options: object) -> Engine:
    defaults = {"kv_cache_bytes": 8 << 20, "max_num_batched_tokens": 96, "max_num_seqs": 4, "max_model_len": 1024}
    return Engine(EngineConfig(model=str(model), device="cpu", **(defaults | options)))


def finish(eng: Engine) -> list[RequestUpdate]:
    updates = []
    while eng.has_unfinished():
        updates += eng.step()
    assert not any(update.error for update in updates)
    return updates


def assert_drained(eng: Engine) -> None:
    stats = eng.stats()
    assert stats.pages_free == stats.pages_total and not any(stats.pages_by_kind.values())


@pytest.mark.parametrize("steps", [1, 2, 107, 108])  # 96, 150, 255 and 256 tokens are computed
def test_a_moved_request_goes_on_as_if_it_had_stayed(folder: Path, steps: int) -> None:
    """In the middle of the prompt, after it, and around the end of a block; penalties, seed and counts go on, too."""
    params = SamplingParams(temperature=0.8, seed=7, frequency_penalty=0.5, max_tokens=steps + 12, ignore_eos=True, logprobs=2)
    one, other = engine(folder), engine(folder, kv_cache_bytes=6 << 20, enable_prefix_caching=False)
    one.add(EngineRequest("a", PROMPT, params))
    before = [update for _ in range(steps) for update in one.step()]
    sent = one.export_sequence("a")
    assert sent.num_tokens == min(96 * steps, 150 + max(0, steps - 2))
    assert sent.payload_bytes == sum(cost.payload for cost in sequence_cost(one.runner.plan, sent.num_tokens))
    other.add(
        EngineRequest("b", PROMPT[:40], SamplingParams(temperature=0, max_tokens=3))
    )  # it does not come into an empty engine
    other.step()
    other.import_sequence(EngineRequest("a", PROMPT, params), HandOver.from_bytes(sent.to_bytes()))
    moved = [update for update in finish(other) if update.request_id == "a"]
    stayed = finish(one)
    assert len(before) + len(stayed) == steps + 12
    assert [u.token_ids for u in moved] == [u.token_ids for u in stayed] and moved[-1].finish_reason == "length"
    for here, there in zip(stayed, moved, strict=True):
        torch.testing.assert_close(here.logprobs[0].logprob, there.logprobs[0].logprob, rtol=0, atol=1e-5)
    assert_drained(one), assert_drained(other)


def test_alone_in_both_engines_every_logprob_is_equal_to_the_bit(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    one, other = engine(folder), engine(folder)
    one.add(EngineRequest("a", PROMPT, params))
    for _ in range(5):
        one.step()
    other.import_sequence(EngineRequest("a", PROMPT, params), one.export_sequence("a"))
    assert [dataclasses.astuple(u) for u in finish(other)] == [dataclasses.astuple(u) for u in finish(one)]


@pytest.mark.parametrize(
    "options", [{"kv_layout": "v4"}, {"kv_layout": "v41", "compressed_kv_layout": "fp4", "index_layout": "fp4"}]
)
def test_packed_records_move(options: dict[str, str]) -> None:
    one, other = (engine("tiny", kv_cache_bytes=64 << 20, max_num_batched_tokens=512, **options) for _ in range(2))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    request = EngineRequest("a", random.Random(5).choices(range(4000), k=300), params)
    one.add(request)
    one.step()
    other.import_sequence(request, HandOver.from_bytes(one.export_sequence("a").to_bytes()))
    assert [dataclasses.astuple(u) for u in finish(other)] == [dataclasses.astuple(u) for u in finish(one)]


def test_what_cannot_be_moved_is_refused_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    one, other = engine(folder), engine(folder)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    request = EngineRequest("a", PROMPT, params)
    one.add(request)
    with pytest.raises(RequestError, match="'a' has nothing in the caches"):
        one.export_sequence("a")
    with pytest.raises(RequestError, match="'ghost' has nothing"):
        one.export_sequence("ghost")
    for _ in range(4):
        one.step()
    handed = one.export_sequence("a")
    refused = [
        (EngineRequest("a", PROMPT[:-1] + [3], params), "another prompt"),
        (EngineRequest("a", [*handed.token_ids, 5], params), "another prompt"),
        (EngineRequest("a", PROMPT, SamplingParams(max_tokens=2)), "nothing to compute; raise max_tokens"),
        (EngineRequest("", PROMPT, params), "request_id"),
    ]
    for bad, message in refused:
        with pytest.raises(RequestError, match=message):
            other.import_sequence(bad, handed)
    with pytest.raises(RequestError, match="token id 999 is out of range"):
        other.import_sequence(request, dataclasses.replace(handed, token_ids=[*handed.token_ids[:-1], 999]))
    with pytest.raises(HandOverError, match="contradicts itself"):
        other.import_sequence(request, dataclasses.replace(handed, num_tokens=10**6))
    assert not other.has_unfinished()
    assert_drained(other)

    random_v4_checkpoint(tmp_path, config_dict([0, 4, 128, 4]), seed=4, quantised=False)
    stranger = engine(tmp_path)
    with pytest.raises(HandOverError, match="another model"):
        stranger.import_sequence(request, handed)
    with pytest.raises(HandOverError, match="'window' is"):
        engine(folder, kv_layout="bf16").import_sequence(request, handed)
    other.import_sequence(request, handed)
    with pytest.raises(RequestError, match="'a' is already in use"):
        other.import_sequence(request, handed)
    assert finish(other)[-1].token_ids == finish(one)[-1].token_ids


def test_prompt_logprobs_do_not_move_before_they_are_reported(folder: Path) -> None:
    one, other = engine(folder), engine(folder)
    request = EngineRequest("a", PROMPT, SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1))
    one.add(request)
    one.step()
    with pytest.raises(RequestError, match="prompt_logprobs need the whole prompt"):
        other.import_sequence(request, one.export_sequence("a"))
    one.step()
    other.import_sequence(request, one.export_sequence("a"))
    assert finish(other)[-1].token_ids == finish(one)[-1].token_ids


def test_a_full_engine_says_so_and_takes_nothing(folder: Path) -> None:
    one, full = engine(folder), engine(folder, max_num_seqs=1)
    request = EngineRequest("a", PROMPT, SamplingParams(temperature=0, max_tokens=8))
    one.add(request)
    one.step()
    handed = one.export_sequence("a")
    full.add(EngineRequest("b", PROMPT, SamplingParams(temperature=0, max_tokens=2)))
    full.step()
    free = full.stats().pages_free
    with pytest.raises(RequestError, match="no room for a sequence of 96 tokens now"):
        full.import_sequence(request, handed)
    assert full.stats().pages_free == free
    finish(full)
    full.import_sequence(request, handed)
    finish(full)
    assert_drained(full)
