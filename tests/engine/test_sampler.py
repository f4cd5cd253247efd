"""Sampling: exact distributions, ties, limits, isolation of rows, and streams of random numbers."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.engine.request import SamplingParams
from abyssal.engine.sampler import LOGPROB_FLOOR, SampledToken, SamplerState, prompt_logprobs, sample
from abyssal.errors import RequestError

EOS = [1]
INF = float("inf")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def state(prompt=(5,), outputs=(), fallback=(0, 1), **params) -> SamplerState:
    return SamplerState(SamplingParams(**params), list(prompt), EOS, fallback, outputs)


def one(logits, **kwargs) -> SampledToken:
    return sample(torch.tensor([logits]), [state(**kwargs)])[0]


def draws(logits, count, **kwargs) -> list[int]:
    """`count` tokens of one request; the logits stay the same."""
    row, request, tokens = torch.tensor([logits]), state(**kwargs), []
    for _ in range(count):
        tokens.append(sample(row, [request])[0].token_id)
        request.append(tokens[-1])
    return tokens


def expected(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> list[float]:
    """The distribution by definition, in plain Python and float64."""
    best = max(logits)
    probs = [math.exp((x - best) / temperature) for x in logits]
    probs = [p if p >= min_p * max(probs) else 0.0 for p in probs]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    for i in order[top_k or len(order) :]:
        probs[i] = 0.0
    mass, total = 0.0, sum(probs)
    for i in order:
        before, mass = mass, mass + probs[i]
        if before >= top_p * total * (1 - 1e-9) and before > 0:
            probs[i] = 0.0
    return [p / sum(probs) for p in probs]


# Greedy and ties


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 2, 7, 129, 4096, 129280])
def test_greedy_takes_the_lowest_of_equal_logits(device, vocab):
    torch.manual_seed(vocab)
    logits = torch.randint(0, 3, (33, vocab), device=device).float()
    want = [row.index(max(row)) for row in logits.tolist()]
    assert [t.token_id for t in sample(logits, [state(temperature=0.0) for _ in want])] == want


@pytest.mark.parametrize("device", DEVICES)
def test_top_k_and_top_p_ties_keep_the_lowest_ids(device):
    """Forty equal tokens: top_k 3 and a top_p that needs three must both leave ids 0, 1, 2."""
    for params in ({"top_k": 3}, {"top_p": 2.5 / 40}):
        rows = torch.zeros(200, 40, device=device)
        states = [state(seed=i, **params) for i in range(200)]
        assert {t.token_id for t in sample(rows, states)} == {0, 1, 2}


def test_top_k_separates_logits_that_softmax_cannot():
    """A huge temperature makes all probabilities equal; the k largest logits are still the ones kept."""
    logits = torch.arange(50.0).repeat(100, 1)
    tokens = sample(logits, [state(seed=i, top_k=2, temperature=1e30) for i in range(100)])
    assert {t.token_id for t in tokens} == {48, 49}


# Distribution


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_draws_follow_the_distribution(params):
    """Chi-square over 4,000 draws of one request against the definition; fixed seed, so this either always passes or never."""
    logits = [0.1, 2.0, -1.0, 1.0, 1.5, -INF, 0.0, 2.5]
    probs, count = expected(logits, **params), 4000
    rows = torch.tensor([logits]).repeat(count, 1)
    states = [state(seed=11, outputs=[0] * i, **params) for i in range(count)]
    tokens = [t.token_id for t in sample(rows, states)]
    live = [i for i, p in enumerate(probs) if p > 0]
    assert set(tokens) <= set(live)
    chi = sum((tokens.count(i) - count * probs[i]) ** 2 / (count * probs[i]) for i in live)
    freedom = len(live) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom) + 4  # about 1 in 10,000


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.one_of(st.floats(-20, 20, width=32), st.just(-INF)), min_size=1, max_size=12),
    temperature=st.sampled_from([1e-300, 1e-6, 0.3, 1.0, 50.0, 1e300]),
    top_k=st.integers(0, 15),
    top_p=st.sampled_from([1e-300, 0.1, 0.5, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-12, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_l23_any_valid_parameters_draw_a_token_that_the_definition_allows(logits, temperature, top_k, top_p, min_p, seed):
    if max(logits) == -INF:
        logits[0] = 0.0
    token = one(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, logprobs=3)
    assert token.error is None
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert logits[token.token_id] > -INF
    assert order.index(token.token_id) < (top_k or len(order))
    if min_p == 1.0:
        assert logits[token.token_id] >= max(logits) - 1e-3 * max(temperature, 1e-3)
    if top_p == 1e-300:
        assert token.token_id == order[0]
    assert all(map(math.isfinite, [token.logprobs.logprob, *token.logprobs.top_logprobs]))


def test_top_p_keeps_the_token_that_crosses_the_mass():
    """Probabilities 1/2, 1/4, 1/8, 1/8: 0.5 needs one token, just above needs two, 0.75 two, 0.76 three."""
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    for top_p, size in [(0.49, 1), (0.501, 2), (0.749, 2), (0.751, 3), (0.874, 3), (0.876, 4)]:
        tokens = sample(torch.tensor([logits]).repeat(300, 1), [state(seed=i, top_p=top_p) for i in range(300)])
        assert {t.token_id for t in tokens} == set(range(size)), top_p


def test_rare_tokens_far_down_a_large_vocabulary_are_drawn_in_proportion():
    """129,280 equal tokens: half of the mass lies in the upper half; fp32 running sums would drift."""
    logits = torch.zeros(1, 129280)
    request, upper = state(seed=5), 0
    for _ in range(200):
        token = sample(logits, [request])[0].token_id
        request.append(token)
        upper += token >= 64640
    assert 70 <= upper <= 130


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-53, 3)])
@pytest.mark.parametrize("params", [{}, {"top_k": 4}], ids=str)
def test_smallest_and_largest_random_number_draw_a_possible_token(monkeypatch, uniform, token, params):
    """Ids 0, 2, 4 and 5 have no probability; a draw at the very edge must not fall on one of them."""
    monkeypatch.setattr(SamplerState, "next_uniform", lambda self, ahead: uniform)
    assert one([-INF, 0.3, -INF, 0.1, -INF, -INF], **params).token_id == token


# Random streams (L19, D07)


def test_l19_requests_without_a_seed_differ():
    logits = [0.0] * 1000
    runs = [draws(logits, 4, fallback=(0, number)) for number in range(20)]
    assert len({tuple(run) for run in runs}) == 20
    together = sample(torch.zeros(20, 1000), [state(fallback=(0, number)) for number in range(20)])
    assert [t.token_id for t in together] == [run[0] for run in runs]


def test_l19_same_seed_gives_the_same_tokens_alone_in_a_batch_and_after_restart():
    torch.manual_seed(0)
    logits = torch.randn(8, 500)
    params = {"seed": 3, "top_p": 0.9, "temperature": 0.8}
    alone = sample(logits[4:5], [state(fallback=(0, 1), **params)])[0].token_id
    others = [state(seed=i, temperature=i % 2, top_k=i, fallback=(0, i)) for i in range(8)]
    others[4] = state(fallback=(99, 77), **params)
    assert sample(logits, others)[4].token_id == alone


def test_seeds_and_engine_streams_do_not_collide():
    logits = [0.0] * 100_000
    assert draws(logits, 3, seed=1) != draws(logits, 3, fallback=(1, 1))
    assert draws(logits, 3, fallback=(1, 11)) != draws(logits, 3, fallback=(11, 1))
    assert draws(logits, 3, seed=1) != draws(logits, 3, seed=-1)
    assert len(set(draws(logits, 50, seed=1))) == 50


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_the_rest_of_the_batch(data):
    """Any mix of parameters, bad rows included, in any order, gives every request what it gets alone."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2, "frequency_penalty": 1.0},
        {"seed": 1},
        {"seed": 2, "top_k": 5, "logprobs": 0},
        {"seed": 3, "top_p": 0.5, "min_p": 0.01},
        {"seed": 4, "logit_bias": {3: 100.0}, "min_tokens": 5},
        {"seed": 5, "repetition_penalty": 3.0, "presence_penalty": -2.0},
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=9))
    bad = data.draw(st.sets(st.integers(0, len(chosen) - 1), max_size=2))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(chosen), 64) * 4
    for i in bad:
        logits[i, i] = float("nan")
    make = [lambda k=k: state(prompt=[4, 4, 9], outputs=[7, 7, 2], **k) for k in chosen]
    batch = sample(logits, [m() for m in make])
    assert batch == [sample(logits[i : i + 1], [m()])[0] for i, m in enumerate(make)]
    assert {i for i, t in enumerate(batch) if t.error} == bad


def test_logits_are_not_written_to():
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(logits, [state(logit_bias={1: 5.0}, repetition_penalty=2.0), state(top_k=3, top_p=0.5)])
    assert torch.equal(logits, before)


def test_non_contiguous_logits():
    logits = torch.randn(64, 3)
    rows = logits.t()
    states = [{"seed": 1, "top_k": 9, "logprobs": 4}, {"temperature": 0.0}, {"seed": 2}]
    assert sample(rows, [state(**s) for s in states]) == sample(rows.contiguous(), [state(**s) for s in states])


# Bias, min_tokens, penalties


def test_logit_bias_decides_and_forbids():
    logits = [3.0, 2.0, 1.0, 0.0]
    assert one(logits, temperature=0.0, logit_bias={3: 100}).token_id == 3
    assert one(logits, temperature=0.0, logit_bias={0: -100, 1: -100.0}).token_id == 2


def test_min_tokens_forbids_eos_and_stop_ids_until_enough_are_generated():
    logits = [0.0, 9.0, 8.0, 1.0]  # 1 is EOS, 2 a stop id
    for outputs, token in [([], 3), ([3], 3), ([3, 3], 1)]:
        assert one(logits, temperature=0.0, min_tokens=2, stop_token_ids=[2], outputs=outputs).token_id == token
    assert one(logits, temperature=0.0, min_tokens=2, ignore_eos=True).token_id == 1


def test_min_tokens_that_leaves_nothing_is_an_error_of_that_request_only():
    rows = torch.zeros(2, 3)
    tokens = sample(rows, [state(min_tokens=1, stop_token_ids=[0, 1, 2]), state(temperature=0.0)])
    assert "min_tokens" in tokens[0].error and tokens[0].token_id == -1
    assert tokens[1] == SampledToken(0)


def test_d07_penalties_count_outputs_only_and_survive_being_taken_up_again():
    """A request with its outputs handed over at once equals one that saw them one by one."""
    logits = torch.randn(1, 40)
    params = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "seed": 7, "logprobs": 1}
    request = state(prompt=[1, 2, 2], **params)
    for done in range(30):
        resumed = state(prompt=[1, 2, 2], outputs=request.output_ids, **params)
        token = sample(logits, [request])[0]
        assert sample(logits, [resumed])[0] == token, done
        request.append(token.token_id)
    assert one([2.0, 1.9], prompt=[0, 0, 0], temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0).token_id == 0


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"frequency_penalty": 0.5}, [4.0 - 1.0, -4.0 - 0.5, 2.0, 1.0]),
        ({"presence_penalty": 0.5}, [4.0 - 0.5, -4.0 - 0.5, 2.0, 1.0]),
        ({"repetition_penalty": 2.0}, [2.0, -8.0, 1.0, 1.0]),
        ({"frequency_penalty": -1.0, "presence_penalty": 2.0, "repetition_penalty": 0.5}, [8 + 2 - 2, -2 + 1 - 2, 4.0, 1.0]),
    ],
    ids=str,
)
def test_penalties_by_hand(params, want):
    """Logits 4, -4, 2, 1; output has 0 twice and 1 once, the prompt has 2."""
    row = torch.tensor([4.0, -4.0, 2.0, 1.0])
    state(prompt=[2], outputs=[0, 1, 0], **params).edit(row)
    assert row.tolist() == want


@pytest.mark.parametrize("repetition", [1e-300, 1e-30, 0.01, 100.0, 1e30, 1e300])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e8, 3e38])
def test_l17_l23_extreme_penalties_stay_finite(repetition, scale):
    logits = torch.tensor([[1.0, -1.0, 0.0, 0.5, -INF]]) * max(scale, 1e-38)
    for temperature, sign in itertools.product([0.0, 1e-300, 1.0], [-2.0, 2.0]):
        request = state(
            prompt=[0, 1, 2, 4], outputs=[3, 0, 1], temperature=temperature, repetition_penalty=repetition,
            frequency_penalty=sign, presence_penalty=sign, logprobs=5, seed=1,
        )  # fmt: skip
        token = sample(logits, [request])[0]
        assert token.error is None and token.token_id != 4
        json.dumps(token.logprobs.top_logprobs, allow_nan=False)


# Log-probabilities


def test_l17_minus_infinity_is_given_as_a_finite_number():
    """One legal token: the four others have probability 0, and JSON must still be able to say so."""
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.1}, {}):
        token = one([-INF, 0.0, -INF, -INF, -INF], logprobs=5, **params)
        assert token.logprobs.top_ids == [1, 0, 2, 3, 4]
        assert token.logprobs.top_logprobs == [0.0] + [LOGPROB_FLOOR] * 4
        json.dumps(token.logprobs.top_logprobs, allow_nan=False)


def test_logprobs_are_those_of_the_raw_logits():
    """Bias, penalties and temperature change the choice, not the reported probabilities."""
    logits = torch.randn(1, 30)
    plain = sample(logits, [state(temperature=0.0, logprobs=20)])[0]
    forced = sample(logits, [state(temperature=0.3, logprobs=20, logit_bias={17: 100}, frequency_penalty=2.0, outputs=[17])])[0]
    assert forced.token_id == 17
    assert forced.logprobs.top_logprobs == plain.logprobs.top_logprobs
    assert forced.logprobs.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 17]), abs=1e-6)
    assert plain.logprobs.rank == 1 and plain.logprobs.top_ids[0] == plain.token_id


@pytest.mark.parametrize("num_top", [0, 1, 19, 20])
def test_number_of_alternatives(num_top):
    token = one([0.0] * 50, logprobs=num_top, temperature=0.0)
    assert token.logprobs.top_ids == list(range(num_top)) and len(token.logprobs.top_logprobs) == num_top
    assert one([0.0] * 50, temperature=0.0).logprobs is None


def test_more_alternatives_than_tokens():
    assert one([1.0, 2.0, 3.0], logprobs=20, temperature=0.0).logprobs.top_ids == [2, 1, 0]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=70), num_top=st.integers(0, 9))
def test_prompt_logprobs_by_definition(rows, num_top):
    """Ranks, order and values against sorting in Python, with many ties and more rows than one slice."""
    targets = [i % 9 for i in range(len(rows))]
    logits = torch.tensor(rows).float()
    reference = logits.double().log_softmax(-1).tolist()
    for row, target, probs, got in zip(rows, targets, reference, prompt_logprobs(logits, targets, num_top), strict=True):
        order = sorted(range(9), key=lambda i: (-row[i], i))
        assert got.top_ids == order[:num_top] and got.rank == order.index(target) + 1 and got.token_id == target
        assert [got.logprob, *got.top_logprobs] == pytest.approx([probs[target], *(probs[i] for i in got.top_ids)], abs=1e-5)


def test_prompt_logprobs_of_nothing():
    assert prompt_logprobs(torch.empty(0, 10), [], 3) == []


@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_prompt_logprobs_of_poisoned_logits_is_an_error(poison):
    logits = torch.zeros(3, 10)
    logits[1, 4] = poison
    with pytest.raises(RequestError, match="NaN"):
        prompt_logprobs(logits, [1, 2, 3], 2)


# Poisoned rows


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.5}, {"logprobs": 3, "min_tokens": 2}], ids=str
)
@pytest.mark.parametrize("poison", [float("nan"), INF, "all -inf", "all nan"])
def test_poisoned_row_ends_its_own_request_only(params, poison):
    torch.manual_seed(1)
    logits = torch.randn(3, 20)
    if isinstance(poison, str):
        logits[1] = float(poison.removeprefix("all "))
    else:
        logits[1, 13] = poison
    make = lambda i: state(seed=i, **params)
    tokens = sample(logits, [make(i) for i in range(3)])
    assert tokens[1].token_id == -1 and "logits" in tokens[1].error and tokens[1].logprobs is None
    for i in (0, 2):
        assert tokens[i] == sample(logits[i : i + 1], [make(i)])[0] and tokens[i].error is None


def test_empty_batch():
    assert sample(torch.empty(0, 10), []) == []


def test_one_token_vocabulary():
    assert one([-50.0], top_k=1, top_p=0.5, min_p=1.0, logprobs=2).logprobs.logprob == 0.0


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws():
    """Integer weights make a draw depend on rounding of softmax only: of 256 draws at most 2 may fall on another token."""
    torch.manual_seed(2)
    logits = torch.randn(256, 129280) * 3
    states = lambda: [state(seed=i, top_p=0.9 if i % 2 else 1.0, top_k=50 * (i % 3)) for i in range(256)]
    cpu, cuda = sample(logits, states()), sample(logits.cuda(), states())
    assert sum(a.token_id != b.token_id for a, b in zip(cpu, cuda, strict=True)) <= 2
