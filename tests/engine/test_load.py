"""Far more requests than the pools hold: everything finishes, with the tokens that it gets when there is room."""

import random
from dataclasses import replace

import pytest

from abyssal import SamplingParams
from abyssal.checkpoint.source import resolve_model
from abyssal.config import EngineConfig, resolve
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.kv.planner import block_pages, sequence_pages, step_pages
from abyssal.kv.specs import BLOCK_TOKENS, plan_caches
from abyssal.model_config import load_model_config


def requests(count: int, seed: int) -> list[EngineRequest]:
    """Prompts of 1 to 700 tokens, half of them with one of three common beginnings."""
    rng = random.Random(seed)
    starts = [[rng.randrange(2, 4000) for _ in range(600)] for _ in range(3)]
    made = []
    for number in range(count):
        ids = [rng.randrange(2, 4000) for _ in range(rng.randint(1, 350))]
        if rng.random() < 0.5:
            ids = rng.choice(starts)[: rng.randint(200, 600)] + ids[:100]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 40), ignore_eos=True)
        made.append(EngineRequest(f"r{number}", ids, params))
    return made


def serve(engine: Engine, work: list[EngineRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in work}
    for request in work:
        engine.add(request)
    while engine.has_unfinished():
        for update in engine.step():
            assert update.error is None, update.error
            tokens[update.request_id] += update.token_ids
    return tokens


def bytes_for(sequences: int, tokens: int, config: EngineConfig) -> int:
    """Pool bytes for one step and for so many sequences of so many tokens."""
    model = load_model_config(resolve_model("tiny"))
    plan = plan_caches(model, *resolve(config, model, False).record_layouts)
    step, windows, block = step_pages(plan, config.max_num_batched_tokens), sequence_pages(plan), block_pages(plan)
    blocks = -(-tokens // BLOCK_TOKENS)
    return sum(size * (step[b] + sequences * (windows[b] + blocks * block[b])) for b, size in plan.page_bytes.items())


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_requests_in_pools_for_six_sequences_get_the_tokens_they_get_with_room():
    work = requests(200, seed=1)
    base = EngineConfig(model="tiny", device="cpu", max_num_batched_tokens=512, max_model_len=1024)
    expected = serve(Engine(replace(base, kv_cache_bytes=2 << 30, enable_prefix_caching=False)), work)
    tight = Engine(replace(base, kv_cache_bytes=bytes_for(6, 740, base), max_num_seqs=32))
    got = serve(tight, work)
    stats = tight.stats()
    assert got == expected
    assert stats.num_preemptions > 0 and stats.pages_free == stats.pages_total and not any(stats.pages_by_kind.values())
    assert sum(len(t) for t in got.values()) == sum(r.params.max_tokens or 0 for r in work)
