"""Far more requests than the pools hold: everything finishes, with the tokens that it gets when there is room."""

import random

import pytest

from abyssal import SamplingParams
from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest


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


@pytest.mark.long
def test_200_requests_in_pools_for_six_sequences_get_the_tokens_they_get_with_room():
    work = requests(200, seed=1)
    base = EngineConfig(model="tiny", device="cpu", max_num_batched_tokens=512, max_model_len=1024)
    roomy = Engine(base.__class__(**{**_fields(base), "kv_cache_bytes": 2 << 30, "enable_prefix_caching": False}))
    expected = serve(roomy, work)
    tight = Engine(base.__class__(**{**_fields(base), "kv_cache_bytes": _six_sequences(), "max_num_seqs": 32}))
    got = serve(tight, work)
    stats = tight.stats()
    assert got == expected
    assert stats.num_preemptions > 0 and stats.pages_free == stats.pages_total and not any(stats.pages_by_kind.values())
    assert sum(len(t) for t in got.values()) == sum(r.params.max_tokens for r in work)
