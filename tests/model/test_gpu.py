"""The same engine on a CUDA device: plain PyTorch gives the answers of the CPU, kernels stay within the bounds of bf16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abyssal import LLM, SamplingParams
from abyssal.model.model import Model
from tests.model.test_golden import Golden
from tests.model.test_recall import recalled
from tests.support.late import at_worst, one_by_one
from tests.support.slices import slice_engine, small_slice
from tests.support.stepping import Side
from tests.support.v41_model import write_v41

pytestmark = pytest.mark.gpu
Documents = Callable[[int], list[dict[str, Tensor]]]
CACHE_BYTES = 1 << 30
QUESTION = "<｜User｜>Define harbor.<｜Assistant｜></think>"


def test_fp32_answers_are_those_of_the_cpu() -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = []
    for device in ("cpu", "cuda"):
        with LLM("tiny", device=device, dtype="float32", kv_layout="fp32", kv_cache_bytes=CACHE_BYTES) as llm:
            answers.append(llm.generate([QUESTION, QUESTION + "A"], params))
    for here, there in zip(*answers, strict=True):
        assert here.outputs[0].token_ids == there.outputs[0].token_ids and here.outputs[0].text


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_fp32_recall_is_exactly_the_stored_one(tokens: int, recall: Documents) -> None:
    with LLM("tiny", device="cuda", dtype="float32", kv_layout="fp32", kv_cache_bytes=CACHE_BYTES) as llm:
        for document in recall(tokens):
            assert torch.equal(recalled(llm, document), document["fp32_hits"].bool())


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
@pytest.mark.parametrize(("kv_layout", "lost"), [("bf16", 1), ("auto", 2)])
def test_default_precision_loses_few_answers_of_80(kv_layout: str, lost: int, tokens: int, recall: Documents) -> None:
    """bf16 alone may lose one; packed records, the default, 2 % more."""
    with LLM("tiny", device="cuda", backend="reference", kv_layout=kv_layout, kv_cache_bytes=CACHE_BYTES) as llm:
        config = llm.engine.config
        assert (config.dtype, config.kv_layout) == ("bfloat16", {"auto": "v4"}.get(kv_layout, kv_layout))
        hits = sum(int(recalled(llm, document).sum()) for document in recall(tokens))
        assert hits >= sum(int(document["fp32_hits"].sum()) for document in recall(tokens)) - lost, f"{hits} right"


def test_weights_stay_in_their_stored_format() -> None:
    with LLM("tiny", device="cuda", kv_cache_bytes=CACHE_BYTES) as llm:
        block = llm.engine.runner.model.blocks[2]
        assert block.attention.wq_b.groups[0].data.dtype == torch.float8_e4m3fn and block.moe.experts.w13.format == "fp4"
        assert llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids


BACKENDS = ("triton", "hopper")


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_lose_few_answers_of_80(backend: str, tokens: int, recall: Documents) -> None:
    with LLM("tiny", device="cuda", backend=backend, kv_cache_bytes=CACHE_BYTES) as llm:
        assert llm.engine.config.record_layouts == ("v4", "v4", "index_fp8")
        hits = sum(int(recalled(llm, document).sum()) for document in recall(tokens))
    stored = sum(int(document["fp32_hits"].sum()) for document in recall(tokens))
    assert hits >= stored - 2, f"{hits} right, {stored} with fp32 records"


@pytest.mark.parametrize("length", [150, 300, 640])
@pytest.mark.parametrize("name", ["v4_mix_h512", "v41_h512"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_stay_near_the_stored_logits(backend: str, name: str, length: int, goldens: Callable[[str], Path]) -> None:
    """Default records, a prefill in two parts and single tokens. The PyTorch ops with the same records are the measure.

    The V4 reference itself in bf16 has a median row of 0.05 to 0.13, up to 0.9 at the 90th percentile.
    """
    golden = Golden(goldens(name))
    if length not in golden.prompts:
        pytest.skip(f"{name} has no prompt of {length} tokens")
    ids, expected = golden.prompts[length]
    sizes = [length // 2, length - length // 2 - 8, *[1] * 8]
    rows, agree = {}, {}
    for kind in ("reference", backend):
        with LLM(golden.folder, device="cuda", dtype="bfloat16", backend=kind, kv_cache_bytes=CACHE_BYTES) as llm:
            logits = llm.logits(ids, sizes)
        assert logits.isfinite().all()
        rows[kind] = (logits - expected).abs().amax(1)
        agree[kind] = int((logits.argmax(1) == expected.argmax(1)).sum())
    print({k: (float(r.median()), float(r.quantile(0.9)), agree[k]) for k, r in rows.items()})
    assert rows[backend].median() <= 1.2 * rows["reference"].median()
    assert agree[backend] >= agree["reference"] - 0.03 * length


@pytest.mark.parametrize(("batch_invariant", "documents"), [(True, 1), (False, 1), (False, 4)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_together_as_alone(backend: str, batch_invariant: bool, documents: int, recall: Documents) -> None:
    """Prompts of many lengths, then decoded together: the same logits as where each is alone, every token in batch-invariant mode.

    Otherwise the size of a step decides which kernels compute it, and only decoding is near: each prompt has a step of its own there.
    """
    lengths = (20, 127, 128, 145, 300, 700, 1200, 2000)
    texts = [document["input_ids"].tolist() for document in recall(2048)[:documents]]
    prompts = [ids[i : i + n] for ids in texts for i, n in enumerate(lengths)]
    options = {"device": "cuda", "backend": backend, "kv_cache_bytes": CACHE_BYTES, "max_num_batched_tokens": 8192}
    options["batch_invariant"] = batch_invariant
    together = Side("tiny", prompts, **options)
    counts = [len(prompt) - 16 for prompt in prompts]
    rows: dict[tuple[int, int], Tensor] = {}
    for i in range(len(prompts)):
        if not batch_invariant:
            rows |= together.step([n if i == j else 0 for j, n in enumerate(counts)])
    if batch_invariant:
        rows = together.step(counts)
    for _ in range(16):
        rows |= together.step([1] * len(prompts))
    divergences = []
    with LLM("tiny", **options) as llm:
        for i, prompt in enumerate(prompts):
            alone = llm.logits(prompt, [counts[i], *[1] * 16])
            both = torch.stack([rows[i, position] for position in range(len(prompt))])
            if batch_invariant:
                assert torch.equal(both, alone), (i, (both - alone).abs().amax(1).nonzero()[:4])
            a, b = alone[counts[i] :].log_softmax(-1), both[counts[i] :].log_softmax(-1)
            divergences.append((a.exp() * (a - b)).sum(-1))
    together.llm.close()
    means = torch.stack([rows.mean() for rows in divergences])
    assert torch.cat(divergences).mean() < 0.005, means


@pytest.mark.parametrize(("backend", "index_layout"), [("hopper", "fp4"), ("hopper", "fp8"), ("triton", "fp4")])
def test_candidates_together_as_alone(backend: str, index_layout: str, tmp_path: Path) -> None:
    """V4.1 in batch-invariant mode: beside longer sequences a short one's queries have candidate blocks, too."""
    widths = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 8, "o_lora_rank": 16}
    write_v41(tmp_path, 5, hidden_size=512, **widths)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 250, (n,), generator=generator).tolist() for n in (22, 60, 150, 300)]
    options = {"device": "cuda", "dtype": "bfloat16", "backend": backend, "kv_layout": "v41", "index_layout": index_layout}
    options |= {"kv_cache_bytes": 64 << 20, "max_model_len": 1024, "batch_invariant": True}
    together = Side(tmp_path, prompts, **options)
    counts = [len(prompt) - 8 for prompt in prompts]
    rows = together.step(counts)
    for _ in range(8):
        rows |= together.step([1] * len(prompts))
    together.llm.close()
    with LLM(tmp_path, **options) as llm:
        for i, prompt in enumerate(prompts):
            alone = llm.logits(prompt, [counts[i], *[1] * 8])
            assert torch.equal(torch.stack([rows[i, position] for position in range(len(prompt))]), alone)


@pytest.mark.parametrize("name", ["v4-flash", "v4.1-flash"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_do_not_depend_on_when_kernels_start(
    backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk, few and single tokens, by every kind of layer: each launch alone, and all behind each other over late poison."""
    folder = small_slice(name, tmp_path, hidden_size=512, moe_intermediate_size=256)
    sizes = [300, 1, 1, 7, *[1] * 5]
    ids = torch.randint(0, 512, (sum(sizes),), generator=torch.Generator().manual_seed(0)).tolist()
    options = {
        "device": "cuda",
        "dtype": "bfloat16",
        "backend": backend,
        "max_num_batched_tokens": 512,
        "enable_cuda_graphs": False,
    }
    compute, got = Model.compute, []
    for around in (one_by_one, at_worst):

        def within(*args: Any, around: Callable[[], AbstractContextManager[None]] = around, **kwargs: Any) -> Tensor:
            with around():
                return compute(*args, **kwargs)

        monkeypatch.setattr(Model, "compute", within)
        got.append(slice_engine(name, folder, **options).score(ids, sizes, list(range(len(ids)))))
    assert got[0].isfinite().all()
    wrong = (got[1] != got[0]).any(1).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} of {len(ids)} rows differ, from {int(wrong[0])} on"
