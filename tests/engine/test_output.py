"""Output text: any cut of any bytes gives the same answer, nothing of a stop string leaves early, log-probabilities keep step."""

from __future__ import annotations

import itertools
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from abyssal.engine.output import CompletionOutput, OutputDelta, OutputProcessor, RequestOutput, StopMatcher
from abyssal.engine.request import RequestUpdate, SamplingParams, TokenLogprobs
from abyssal.errors import RequestError
from abyssal.tokenizer import Tokenizer

TINY = Tokenizer.load(Path(str(files("abyssal") / "assets" / "tiny-v4")), 4096)
EOS = 1
BYTE_IDS = {TINY.token_bytes(i): i for i in range(4095, 8, -1)}  # the lowest id of each spelling
HARD = [
    "😀",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "𠀋",
    "鿕",
    "e\u0301\u0323",
    "カ\u3099",
    "नि",
    "\U0010ffff",
    "￿",
    "\u0000",
    "é",
    "a",
    " ",
    "\n\n",
    "<think>",
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(HARD), st.text(st.characters(exclude_categories=("Cs",)), max_size=4)), max_size=8
).map("".join)


def single_bytes(text: str) -> list[int]:
    """The finest tokenisation there is: one token per byte."""
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, [], [])


def updates(ids, cuts=None, reason="length", stop_id=None, logprobs=False):
    """Updates that carry `ids`, cut at `cuts` (None: one token each), the last one with the finish reason."""
    edges = sorted({0, len(ids), *(range(len(ids)) if cuts is None else (min(c, len(ids)) for c in cuts))})
    parts = [ids[a:b] for a, b in itertools.pairwise(edges)] or [[]]
    last = len(parts) - 1
    return [
        RequestUpdate("r", part, [score(t) for t in part] if logprobs else None, None)
        if i < last
        else RequestUpdate("r", part, [score(t) for t in part] if logprobs else None, None, reason, stop_id)
        for i, part in enumerate(parts)
    ]


def run(ids, cuts=None, prompt=(), reason="length", stop_id=None, **params) -> tuple[CompletionOutput, list[OutputDelta]]:
    processor = OutputProcessor(TINY, SamplingParams(**params), list(prompt))
    stream = updates(ids, cuts, reason, stop_id, logprobs="logprobs" in params)
    deltas = [processor.push(update) for update in stream]
    output = CompletionOutput(0)
    for delta in deltas:
        output.add(delta)
    return output, deltas


# Detokenisation (K13)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cuts=st.none() | st.lists(st.integers(0, 60), max_size=6))
def test_k13_valid_text_comes_out_whole_however_it_is_cut(text, cuts):
    for ids in (single_bytes(text), TINY.encode(text)):
        output, deltas = run(ids, cuts)
        assert output.text == text and output.token_ids == ids
        if "\ufffd" not in text:
            assert not any("\ufffd" in d.text for d in deltas)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 4200), max_size=15), skip=st.booleans(), cuts=st.none() | st.lists(st.integers(0, 15), max_size=4)
)
def test_any_ids_give_the_full_decode_less_a_cut_character(ids, skip, cuts):
    """Broken bytes in the middle are U+FFFD as in the full decode; an unfinished end is left out."""
    raw = b"".join(TINY.token_bytes(i, skip) for i in ids)
    cut = max([0, *(n for n in (1, 2, 3) if n <= len(raw) and _may_continue(raw[len(raw) - n :]))])
    output, _ = run(ids, cuts, skip_special_tokens=skip)
    assert output.text == raw[: len(raw) - cut].decode(errors="replace")
    if cut == 0:
        assert output.text == TINY.decode(ids, skip)


def _may_continue(raw: bytes) -> bool:
    """Whether some continuation bytes make one character of `raw`, by trying."""
    tails = [bytes([b]) + rest for b in range(0x80, 0xC0) for rest in (b"", b"\x80", b"\x80\x80")]
    return any(_is_character(raw + tail) for tail in tails)


def _is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("reason", ["length", "stop", "abort", "error"])
def test_k13_character_cut_off_by_the_end_is_left_out(keep, reason):
    output, _ = run(single_bytes("ok 😀")[: 3 + keep], reason=reason)
    assert output.text == "ok " and output.finish_reason == reason


def test_output_completes_a_character_that_the_prompt_began():
    ids = single_bytes("😀é")
    for begun in (1, 2, 3):
        assert run(ids[begun:], prompt=single_bytes("tell ") + ids[:begun])[0].text == "😀é"


def test_character_broken_off_in_the_prompt_does_not_reach_the_output():
    assert run(single_bytes("hi"), prompt=single_bytes("😀")[:2])[0].text == "hi"
    assert run(single_bytes("hi"), prompt=[*single_bytes("😀")[:2], 4])[0].text == "hi"


def test_detokenisation_of_a_long_output_is_linear():
    """Work per token does not grow: the waiting text and scores stay short."""
    processor = OutputProcessor(TINY, SamplingParams(stop=["zzz"], logprobs=0), [])
    for update in updates(single_bytes("harbor 😀z " * 400), logprobs=True):
        processor.push(update)
        assert len(processor._waiting) <= 3 and len(processor._scores) <= 5


# Stop strings (K15)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: the least end; of the stops that end there the longest."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return end, max(done, key=len)
    return None


SMALL = st.text("ab<😀\n", max_size=14)
STOPS = st.lists(st.text("ab<😀\n", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=SMALL, stops=STOPS, include=st.booleans(), cuts=st.none() | st.lists(st.integers(0, 40), max_size=5))
@example(text="aab", stops=["aab", "ab"], include=False, cuts=None)
@example(text="abab<", stops=["ababa", "b<"], include=False, cuts=None)
def test_k15_cut_where_the_first_stop_string_completes(text, stops, include, cuts):
    """Every split, overlapping stops, streamed equal to whole; before the end nothing leaves that could still be a stop."""
    ids = single_bytes(text)
    output, deltas = run(ids, cuts, stop=stops, include_stop_str_in_output=include)
    found = first_stop(text, stops)
    if found is None:
        assert (output.text, output.finish_reason, output.stop_reason) == (text, "length", None)
    else:
        end, stop = found
        assert output.text == (text[:end] if include else text[: end - len(stop)])
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == single_bytes(text[:end])
    sent, num_tokens = "", 0
    for delta in itertools.takewhile(lambda d: d.finish_reason is None, deltas):
        sent, num_tokens = sent + delta.text, num_tokens + len(delta.token_ids)
        so_far = text.encode()[:num_tokens].decode(errors="ignore")
        waiting = max((n for s in stops for n in range(1, len(s)) if so_far.endswith(s[:n])), default=0)
        assert sent == so_far[: len(so_far) - waiting]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "kept", "stop"),
    [
        ("The quick brown fox jumps", ["own fox"], "The quick br", "own fox"),
        ("ABCDEFGHIJKL", ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        ("Hi.\nUser: no", ["\nUser:"], "Hi.", "\nUser:"),
        ("ABCDEFGHIJKL", ["CDEFGHIJKL", "FGH"], "ABCDE", "FGH"),
        ("near own fo, own fox", ["own fox"], "near own fo, ", "own fox"),
        ("aaab", ["aab"], "a", "aab"),
    ],
)
def test_k15_named_cases_at_every_split(text, stops, kept, stop, include):
    for ids in (single_bytes(text), TINY.encode(text)):
        for cuts in [None, [], *([i] for i in range(len(ids)))]:
            output, _ = run(ids, cuts, stop=stops, include_stop_str_in_output=include)
            assert (output.text, output.stop_reason) == (kept + stop if include else kept, stop)


def test_k15_near_miss_is_released_as_soon_as_it_is_one():
    _, deltas = run(single_bytes("own fig, own fo"), stop=["own fox"])
    assert [d.text for d in deltas[:9]] == ["", "", "", "", "", "own fi", "g", ",", " "]
    assert [d.text for d in deltas[9:]] == ["", "", "", "", "", "own fo"]  # the end decides


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 4, 9])
def test_stop_string_counts_only_after_min_tokens(min_tokens):
    """ "ab" completes in tokens 2, 4, 6: like EOS, it may not be among the first min_tokens tokens."""
    output, _ = run(single_bytes("ababab"), stop=["ab"], min_tokens=min_tokens)
    want = {0: ("", "ab"), 1: ("", "ab"), 3: ("ab", "ab"), 4: ("abab", "ab"), 9: ("ababab", None)}[min_tokens]
    assert (output.text, output.stop_reason) == want


def test_stop_string_that_begins_within_min_tokens():
    assert run(single_bytes("xaby"), stop=["ab"], min_tokens=2)[0].text == "x"
    assert run(single_bytes("aaab"), stop=["aa"], min_tokens=2)[0].text == "a"


def test_nothing_follows_a_stop_string():
    processor = OutputProcessor(TINY, SamplingParams(stop=["b"], logprobs=0), [])
    first = processor.push(RequestUpdate("r", single_bytes("abc"), [score(t) for t in single_bytes("abc")], None, "length"))
    assert (first.text, first.finish_reason, first.stop_reason, first.token_ids) == ("a", "stop", "b", single_bytes("ab"))
    late = processor.push(RequestUpdate("r", single_bytes("xb"), None, None, "length"))
    assert late == OutputDelta(logprobs=[]) and processor.finished


def test_stop_string_inside_one_token_cuts_the_token():
    ids = TINY.encode("the harbor")
    token = max(ids, key=lambda i: len(TINY.token_bytes(i)))
    text = TINY.decode([token])
    output, _ = run([token], stop=[text[1]], logprobs=0)
    assert output.text == text[:1] and output.token_ids == [token] and len(output.logprobs) == 1


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        OutputProcessor(None, SamplingParams(stop=["a"]), [1])
    assert caught.value.param == "stop"


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_stop_matcher_finds_every_match_and_keeps_what_is_undecided(text, stops):
    """The matcher goes on after a match (min_tokens), so all ends count, not only the first."""
    matcher = StopMatcher(stops)
    for end in range(1, len(text) + 1):
        found = matcher.feed(text[end - 1])
        assert found == max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        undecided = [n for s in stops for n in range(1, len(s)) if text[:end].endswith(s[:n])]
        assert matcher.num_undecided == max(undecided, default=0)


# Ending tokens


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_eos_text_appears_only_where_asked_for_twice(skip, include):
    """EOS is a control token: it needs include_stop_str_in_output and skip_special_tokens=False."""
    ids = [*single_bytes("hi"), EOS]
    output, _ = run(ids, reason="stop", stop_id=EOS, skip_special_tokens=skip, include_stop_str_in_output=include)
    assert output.text == ("hi<｜end▁of▁sentence｜>" if include and not skip else "hi")
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("stop", None, ids)


@pytest.mark.parametrize("include", [True, False])
def test_stop_token_id_is_the_reason_and_its_text_optional(include):
    stop_id = BYTE_IDS[b"."]
    output, _ = run(
        single_bytes("a.b."), reason="stop", stop_id=stop_id, stop_token_ids=[stop_id], include_stop_str_in_output=include
    )
    assert output.text == ("a.b." if include else "a.b") and output.stop_reason == stop_id


def test_l27_eos_that_is_ignored_ends_nothing():
    ids = [*single_bytes("a"), EOS, *single_bytes("b")]
    assert run(ids, ignore_eos=True)[0].text == "ab"
    assert run(ids, ignore_eos=True, skip_special_tokens=False)[0].text == "a<｜end▁of▁sentence｜>b"


def test_eos_as_an_explicit_stop_id_is_a_reason():
    assert run([EOS], reason="stop", stop_id=EOS, stop_token_ids=[EOS])[0].stop_reason == EOS


def test_waiting_text_is_released_by_every_end():
    for reason in ("stop", "length", "abort", "error"):
        output, _ = run(single_bytes("ab"), reason=reason, stop=["abc"])
        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", reason, None)


def test_error_is_passed_on():
    processor = OutputProcessor(TINY, SamplingParams(), [])
    delta = processor.push(RequestUpdate("r", [], None, None, "error", error="no usable logits"))
    assert (delta.finish_reason, delta.error, delta.text) == ("error", "no usable logits", "")


def test_model_without_a_tokenizer_gives_token_ids_only():
    processor = OutputProcessor(None, SamplingParams(logprobs=0), [5])
    delta = processor.push(RequestUpdate("r", [7, 8], [score(7), score(8)], None, "length"))
    assert (delta.text, delta.token_ids, delta.text_offsets, delta.finish_reason) == ("", [7, 8], [0, 0], "length")


# Log-probabilities (L15)


@settings(max_examples=200, deadline=None)
@given(
    text=TEXTS,
    stops=st.lists(st.text("a<é\n", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_l15_offsets_and_scores_do_not_depend_on_streaming(text, stops, cuts):
    """Cut anywhere or not at all, the same tokens are scored, and each offset is where the token's text begins."""
    ids = TINY.encode(text)
    whole, _ = run(ids, [], stop=stops, logprobs=0)
    cut, deltas = run(ids, cuts, stop=stops, logprobs=0)
    assert whole == cut
    scored = [s.token_id for s in cut.logprobs]
    assert scored == ids[: len(scored)] and (stops or len(scored) == len(ids))
    for i, offset in enumerate(cut.text_offsets):
        assert offset == len(b"".join(TINY.token_bytes(t) for t in ids[:i]).decode(errors="ignore"))
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.text_offsets)


def test_k15_scores_of_a_stop_string_do_not_leave_either():
    output, _ = run(single_bytes("hi STOP!"), stop=["STOP"], logprobs=0)
    assert [s.token_id for s in output.logprobs] == single_bytes("hi ")
    assert len(output.token_ids) == 7 and output.text_offsets == [0, 1, 2]
    included, _ = run(single_bytes("hi STOP!"), stop=["STOP"], logprobs=0, include_stop_str_in_output=True)
    assert [s.token_id for s in included.logprobs] == single_bytes("hi STOP")


def test_scores_wait_with_the_text_of_their_token():
    _, deltas = run(single_bytes("xSTx"), stop=["STOP"], logprobs=0)
    assert [len(d.logprobs) for d in deltas] == [1, 0, 0, 3]
    _, deltas = run(single_bytes("é!"), logprobs=0)
    assert [(d.text, d.text_offsets) for d in deltas] == [("", []), ("é", [0, 0]), ("!", [1])]


def test_ending_token_is_scored():
    output, _ = run([*single_bytes("a"), EOS], reason="stop", stop_id=EOS, logprobs=0)
    assert [s.token_id for s in output.logprobs] == [BYTE_IDS[b"a"], EOS] and output.text_offsets == [0, 1]


def test_scores_are_absent_unless_asked_for():
    output, deltas = run(single_bytes("abc"))
    assert output.logprobs is None and output.text_offsets == [] and all(d.logprobs is None for d in deltas)


def test_request_output_is_finished_when_every_output_is():
    outputs = [CompletionOutput(0, finish_reason="stop"), CompletionOutput(1)]
    result = RequestOutput("r", "hi", [1], outputs)
    assert not result.finished
    outputs[1].add(OutputDelta(finish_reason="length"))
    assert result.finished
