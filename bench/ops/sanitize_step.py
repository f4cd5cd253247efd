"""Captured steps of tiny-v4, of prompts and of decoding, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m bench.ops.sanitize_step
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m bench.ops.sanitize_step --launched

Three sequences decode in a shape of four, over the ends of groups of 4 and of 128 tokens. A capture needs PyTorch's allocator, which hands
out parts of large allocations; `--launched` runs the steps op by op instead, where each tensor can be an allocation of its own, beyond
whose end nothing may be read. Run it once without the sanitizer before: kernels are compiled then.
"""

from __future__ import annotations

import argparse
from unittest import mock

from abyssal import LLM, SamplingParams
from abyssal.engine.decoder import Decoder

LENGTHS, STEPS = (1, 125, 253), 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launched", action="store_true", help="launch steps op by op")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    options = {"kv_cache_bytes": 64 << 20, "max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 1024}
    with LLM("tiny", device="cuda", enable_prefix_caching=False, **options) as llm:
        runner = llm.engine.runner
        decoder, pieces = runner.decoder, runner.pieces
        assert decoder is not None and pieces is not None
        if args.launched:
            runner.pieces = None
            with mock.patch.object(Decoder, "_captured", lambda *_: None):
                answers = llm.generate([[5] * n for n in LENGTHS], params)
        else:
            answers = llm.generate([[5] * n for n in LENGTHS], params)
        assert bool(decoder._graphs) == bool(pieces._steps) != args.launched
        print([answer.outputs[0].token_ids for answer in answers])


if __name__ == "__main__":
    main()
