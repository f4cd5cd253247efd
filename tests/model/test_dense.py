"""The paged engine against a forward pass without pages, in which every stored row is replaced by decode(encode(row))."""

import pytest
import torch

from abyssal import LLM
from tests.support.dense import dense_logits

PAIRS = [("fp32", "same"), ("bf16", "same"), ("v4", "same"), ("v41", "same"), ("v41", "fp4")]
INDEX = ["fp32", "bf16", "fp8", "fp4"]
QUICK = [("fp32", "same", "fp32"), ("bf16", "same", "bf16"), ("v4", "same", "fp8"), ("v41", "fp4", "fp4")]
CASES = [
    pytest.param(*pair, index, marks=() if (*pair, index) in QUICK else pytest.mark.long) for pair in PAIRS for index in INDEX
]
TOKENS = torch.randint(2, 4000, (700,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize(("kv", "compressed", "index"), CASES)
def test_logits_equal_those_of_an_unpaged_forward_over_the_stored_records(kv, compressed, index):
    options = {"kv_layout": kv, "compressed_kv_layout": compressed, "index_layout": index}
    with LLM("tiny", kv_cache_bytes=128 << 20, max_model_len=2048, **options) as llm:
        layouts = {name: spec.layout for name, spec in llm.engine.cache.specs.items()}
        expected = dense_logits(llm.engine.runner.model, TOKENS, layouts)
        torch.testing.assert_close(llm.logits(TOKENS), expected, atol=1e-4, rtol=0)
