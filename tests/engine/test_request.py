"""Requests: every parameter at and just outside its limits, as a wrong type, and against the engine's bounds."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abyssal.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    EngineLimits,
    EngineRequest,
    SamplingParams,
    check_request,
    ending_token_ids,
)
from abyssal.errors import RequestError

LIMITS = EngineLimits(vocab_size=100, max_model_len=32, capacity_tokens=1000)
NAN, INF = float("nan"), float("inf")
TINY_STEP = 1e-9

# field: values that are allowed, values that are not
RANGES = {
    "n": ([1, 128], [0, -1, 129, 10**30]),
    "temperature": ([0, 0.0, 5e-324, 2, 1e308, 2**1000], [-TINY_STEP, -1, NAN, INF, -INF, 10**400]),
    "top_p": ([5e-324, 0.5, 1, 1.0], [0, 0.0, -0.1, 1 + TINY_STEP, 2, NAN, INF]),
    "top_k": ([0, -1, 1, 2**31 - 1], [-2, 2**31]),
    "min_p": ([0, 0.0, 1, 1.0], [-TINY_STEP, 1 + TINY_STEP, NAN, INF]),
    "presence_penalty": ([-2, 2, 0.5], [-2 - TINY_STEP, 2 + TINY_STEP, NAN, INF]),
    "frequency_penalty": ([-2.0, 2.0, 0], [-2 - TINY_STEP, 2 + TINY_STEP, NAN, -INF]),
    "repetition_penalty": ([5e-324, 1, 1e308, 2**1000], [0, 0.0, -0.0, -1, NAN, INF]),
    "seed": ([None, 0, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
    "logprobs": ([None, 0, 20], [-1, 21]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21]),
    "min_tokens": ([0, 2**31 - 1], [-1, 2**31]),
    "max_tokens": ([None, 1, 2**31 - 1], [0, -1, 2**31]),
    "stop": (
        [[], ["a"], ["a"] * 16, ["x" * MAX_STOP_CHARS]],
        [["a"] * 17, [""], ["x" * (MAX_STOP_CHARS + 1)], ["\ud800"], ["a\udfff"]],
    ),
    "stop_token_ids": ([[], [0], [5] * MAX_STOP_TOKEN_IDS], [[-1], [5] * (MAX_STOP_TOKEN_IDS + 1)]),
    "logit_bias": (
        [None, {}, {0: -100, 1: 100.0}, dict.fromkeys(range(MAX_LOGIT_BIAS), 1)],
        [{-1: 1}, {1: 100.5}, {1: -101}, {1: NAN}, {1: INF}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1), {10**12: 1}],
    ),
    "include_stop_str_in_output": ([True, False], []),
    "ignore_eos": ([True, False], []),
    "skip_special_tokens": ([True, False], []),
}
NULLABLE = {"seed", "logprobs", "prompt_logprobs", "max_tokens", "logit_bias"}
FLOATS = {"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
BOOLS = {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"}


def request(prompt=(1, 2), request_id="r", **params) -> EngineRequest:
    return EngineRequest(request_id, list(prompt) if isinstance(prompt, tuple) else prompt, SamplingParams(**params))


def refused(call, param, code=None) -> str:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.param == param and caught.value.code == code
    return str(caught.value)


def test_every_field_has_its_limits_tested():
    assert set(RANGES) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, (good, _) in RANGES.items() for v in good])
def test_l23_at_the_limits(name, value):
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == (0 if (name, value) == ("top_k", -1) else value)


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, (_, bad) in RANGES.items() for v in bad])
def test_l23_outside_the_limits_names_the_field(name, value):
    message = refused(lambda: SamplingParams(**{name: value}), name)
    assert name in message and len(message) < 300


@pytest.mark.parametrize("name", RANGES)
def test_l23_wrong_types_name_the_field(name):
    wrong = ["1", "NaN", b"1", [1], (1,), {1: "x"}, {"1": 1}, [1.0], [True], [None], object(), 1j]
    wrong += [] if name in BOOLS else [True, False]
    wrong += [] if name in NULLABLE else [None]
    wrong += [] if name in FLOATS else [1.5, 1.0, NAN]
    wrong += [1, 0] if name in BOOLS or name in ("stop", "stop_token_ids", "logit_bias") else []
    for value in wrong:
        if name == "stop_token_ids" and value == [1] and type(value[0]) is int:
            continue
        if name == "stop" and isinstance(value, str):
            continue  # one stop string
        refused(lambda v=value: SamplingParams(**{name: v}), name)


def test_l03_logit_bias_keys_as_text_are_refused():
    for key in ("abc", "1.5", "1", 1.0, True, None):
        refused(lambda k=key: SamplingParams(logit_bias={k: 1}), "logit_bias")


def test_l03_five_thousand_entries():
    assert str(MAX_LOGIT_BIAS) in refused(lambda: SamplingParams(logit_bias=dict.fromkeys(range(5000), 1)), "logit_bias")


def test_message_does_not_repeat_a_huge_value():
    assert len(refused(lambda: SamplingParams(stop="x" * 10**6), "stop")) < 200


def test_contradiction_of_min_and_max_tokens_names_both():
    message = refused(lambda: SamplingParams(min_tokens=6, max_tokens=5), "min_tokens")
    assert "6" in message and "max_tokens=5" in message
    SamplingParams(min_tokens=5, max_tokens=5)


def test_parameters_changed_after_construction_are_checked_again():
    changed = request()
    changed.params.top_p = 7.0
    refused(lambda: check_request(changed, LIMITS), "top_p")


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(
                st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
            )
            for name in RANGES
        },
    )
)
def test_arbitrary_values_are_either_refused_by_name_or_in_range(values):
    """Whatever arrives: a RequestError that names one of the given fields, or parameters whose numbers are all finite."""
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        assert error.param in values
    else:
        numbers = [getattr(params, name) for name in FLOATS]
        assert all(math.isfinite(x) for x in numbers) and params.top_p > 0 and params.repetition_penalty > 0 and params.top_k >= 0


# Against an engine


@pytest.mark.parametrize("bad", [[-1], [100], [10**12], [1.0], ["1"], [True], [None], [1, "a"], [[1]], [1, -1, 2]], ids=str)
def test_l13_prompt_ids_out_of_range_or_of_wrong_type(bad):
    refused(lambda: check_request(request(bad), LIMITS), "prompt")


@pytest.mark.parametrize("empty", [[], None, "text", (1, 2), {}], ids=str)
def test_empty_or_wrong_prompt(empty):
    refused(lambda: check_request(EngineRequest("r", empty, SamplingParams()), LIMITS), "prompt")


def test_l03_l13_first_and_last_id_pass_and_the_next_does_not():
    """Also between the tokenizer's and the model's padded size: `vocab_size` is the tokenizer's."""
    assert check_request(request((0, 99), logit_bias={0: 1, 99: -1}, stop_token_ids=[0, 99]), LIMITS) == 30
    refused(lambda: check_request(request(logit_bias={100: 1}), LIMITS), "logit_bias")
    refused(lambda: check_request(request(stop_token_ids=[100]), LIMITS), "stop_token_ids")


def test_a_salt_that_no_message_can_hold():
    refused(lambda: check_request(EngineRequest("a", [1], SamplingParams(), cache_salt="a\ud800"), LIMITS), "cache_salt")


@pytest.mark.parametrize("bad", ["", None, 3])
def test_request_id(bad):
    refused(lambda: check_request(request(request_id=bad), LIMITS), "request_id")


@pytest.mark.parametrize(
    ("max_tokens", "want"), [(None, 22), (1, 1), (21, 21), (22, 22), (23, 22), (10**6, 22)], ids=lambda v: str(v)
)
def test_l11_cap_is_clamped_to_the_room_left(max_tokens, want):
    """A prompt of 10 in a context of 32."""
    assert check_request(request((1,) * 10, max_tokens=max_tokens), LIMITS) == want


@pytest.mark.parametrize(("length", "room"), [(30, 2), (31, 1)])
def test_l11_prompt_one_under_the_limit_may_still_generate(length, room):
    assert check_request(request((1,) * length), LIMITS) == room


@pytest.mark.parametrize("length", [32, 33, 1000])
def test_l11_prompt_at_or_over_the_limit_is_context_length_exceeded(length):
    limits = EngineLimits(100, max_model_len=32, capacity_tokens=100)
    message = refused(lambda: check_request(request((1,) * length), limits), "prompt", "context_length_exceeded")
    assert str(length) in message and "at most 31" in message and "the model's context" in message


@pytest.mark.parametrize("longest", [8, 1000])
def test_prompt_that_only_the_cache_cannot_hold(longest):
    """The longest sequence is that of the cache by itself, where nobody asked for another."""
    limits = EngineLimits(100, max_model_len=longest, capacity_tokens=8)
    assert check_request(request((1,) * 7), limits) == 1
    message = refused(lambda: check_request(request((1,) * 8), limits), "prompt", "context_length_exceeded")
    assert "KV cache" in message and "at most 7" in message


def test_min_tokens_beyond_the_room_is_an_error():
    assert check_request(request((1,) * 10, min_tokens=22), LIMITS) == 22
    refused(lambda: check_request(request((1,) * 10, min_tokens=23), LIMITS), "min_tokens")
    refused(lambda: check_request(request((1,) * 10, min_tokens=23, max_tokens=50), LIMITS), "min_tokens")


def test_l27_union_of_what_ends_an_output():
    assert ending_token_ids(SamplingParams(), [1, 7]) == {1, 7}
    assert ending_token_ids(SamplingParams(stop_token_ids=[3]), [1, 7]) == {1, 3, 7}
    assert ending_token_ids(SamplingParams(ignore_eos=True), [1, 7]) == set()
    assert ending_token_ids(SamplingParams(ignore_eos=True, stop_token_ids=[1]), [1, 7]) == {1}


def test_requests_survive_the_wire():
    """Dataclasses are validated again where they arrive, and equal what was sent, as everything that is allowed."""
    msgpack = pytest.importorskip("msgspec", reason="only the server needs msgspec").msgpack
    for name, (good, _) in RANGES.items():
        for value in good:
            params = SamplingParams(**{name: value})
            assert msgpack.decode(msgpack.encode(params), type=SamplingParams) == params
    sent = request((1, 2), stop=["é"], logit_bias={5: -1.5}, temperature=1, seed=-(2**63), top_k=-1)
    assert msgpack.decode(msgpack.encode(sent), type=EngineRequest) == sent
    broken = msgpack.encode(sent).replace(b"\xa5top_p\xcb\x3f\xf0", b"\xa5top_p\xcb\xbf\xf0")
    refused(lambda: msgpack.decode(broken, type=EngineRequest), "top_p")


def test_the_token_of_an_image_is_refused() -> None:
    """V4.1's image token in a prompt of ids would be read as a word."""
    limits = replace(LIMITS, image_token_id=7)
    with pytest.raises(RequestError, match="token id 7 stands for an image, and this version reads text only"):
        check_request(EngineRequest("a", [3, 7, 4], SamplingParams()), limits)
    assert check_request(EngineRequest("a", [3, 8, 4], SamplingParams()), limits) == 29
    assert check_request(EngineRequest("a", [3, 7, 4], SamplingParams()), LIMITS) == 29


def test_one_stop_string_becomes_a_list() -> None:
    params = SamplingParams(stop="end")
    assert params.stop == ["end"] and params == SamplingParams(stop=["end"])
    params.stop = "other"  # type: ignore[assignment]
    params.validate()
    assert params.stop == ["other"]


def test_an_unknown_parameter_is_named_with_the_closest() -> None:
    for name, close in (("max_token", "max_tokens"), ("temprature", "temperature")):
        with pytest.raises(RequestError, match=f"unknown parameter '{name}'; did you mean '{close}'") as caught:
            SamplingParams(**{name: 5})
        assert caught.value.param == name
    with pytest.raises(RequestError, match="unknown parameter 'beam_width'; known: .*temperature"):
        SamplingParams(beam_width=5)  # type: ignore[call-arg]


def test_parameters_survive_copies() -> None:
    params = SamplingParams(stop="end", seed=3, logit_bias={5: 1.0})
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == replace(params, n=1) == params


def test_a_subclass_of_sampling_params_knows_all_names() -> None:
    class Quiet(SamplingParams):
        """As users make for a default of their own."""

    assert Quiet(temperature=0.5).temperature == 0.5
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        Quiet(temprature=0.5)
