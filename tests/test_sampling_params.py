"""`SamplingParams` takes what makes sense, and refuses the rest with an `InvalidRequestError`."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.errors import InvalidRequestError

INTEGERS = {"n": 1, "top_k": -1, "min_tokens": 0, "max_tokens": 1, "logprobs": 0, "seed": 0}
NUMBERS = {
    "temperature": (0.0, math.inf, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, math.inf, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}  # lowest, highest, and whether the lowest is allowed
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
# How long generating inputs takes says nothing about the code under test.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("a1 é", max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text("a1 é", max_size=3), st.none()), max_size=3),
    st.complex_numbers(),
    st.just(object()),
    st.just({"a": 1}),
    st.just(10**400),
)


@unhurried
@given(values=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4))
def test_any_value_is_either_taken_or_refused_with_an_invalid_request_error(values):
    try:
        params = SamplingParams(**values)
    except InvalidRequestError:
        return
    for name in NUMBERS:
        assert type(getattr(params, name)) is float
        assert math.isfinite(getattr(params, name))
    for name in SWITCHES:
        assert type(getattr(params, name)) is bool
    assert all(isinstance(stop, str) and stop for stop in params.stop)
    assert all(type(token) is int and token >= 0 for token in params.stop_token_ids)
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
    hash(params)


@unhurried
@given(name=st.sampled_from(sorted(NUMBERS)), value=st.floats())
def test_a_number_is_taken_exactly_if_it_lies_in_its_range(name, value):
    low, high, low_allowed = NUMBERS[name]
    inside = low < value <= high or (value == low and low_allowed)
    if inside and math.isfinite(value):
        assert getattr(SamplingParams(**{name: value}), name) == value
    else:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: value})


@unhurried
@given(name=st.sampled_from(sorted(INTEGERS)), value=st.integers(-(2**64), 2**64))
def test_an_integer_is_taken_exactly_if_it_lies_in_its_range(name, value):
    high = {"seed": 2**63 - 1, "n": 16384}.get(name, math.inf)
    others = {"max_tokens": None} if name == "min_tokens" else {}
    if INTEGERS[name] <= value <= high:
        assert getattr(SamplingParams(**{name: value}, **others), name) == value
    else:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: value}, **others)


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
@pytest.mark.parametrize("value", [True, "1", b"1", [1], 1j])
def test_what_is_not_a_number_is_refused(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "false", None])
def test_a_switch_must_be_true_or_false(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


def test_numbers_of_other_types_become_plain_ones():
    params = SamplingParams(
        n=np.int64(2), top_k=np.int32(5), temperature=np.float32(0.5), top_p=Fraction(1, 4), min_p=0
    )
    assert [(type(v), v) for v in (params.n, params.top_k)] == [(int, 2), (int, 5)]
    assert [(type(v), v) for v in (params.temperature, params.top_p, params.min_p)] == [
        (float, 0.5),
        (float, 0.25),
        (float, 0.0),
    ]


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], 1, [None], b"a", [["a"]]])
def test_a_stop_must_be_text(stop):
    with pytest.raises(InvalidRequestError, match="stop"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("token_ids", [1, "1", b"1", [-1], [True], [1.0], ["1"], [None]])
def test_stop_token_ids_must_be_token_ids(token_ids):
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=token_ids)


def test_stop_token_ids_may_be_an_array():
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)


def test_more_tokens_at_least_than_at_most_are_refused_with_both_numbers():
    with pytest.raises(InvalidRequestError, match=r"min_tokens=5 .* max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize(
    ("change", "has_penalties"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalties_are_noticed(change, has_penalties):
    assert SamplingParams(**change).has_penalties is has_penalties


def test_only_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy
