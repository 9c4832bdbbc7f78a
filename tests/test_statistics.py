"""Statistics of few runs: known answers and properties."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlnb.lab.statistics import difference, interquartile_mean, probability_of_improvement, stratified_bootstrap, wilson

scores = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8)


@given(scores, st.floats(-100, 100))
def test_an_interval_moves_with_its_scores(values, shift):
    here, there = (stratified_bootstrap({"a": v}, draws=200) for v in (values, [x + shift for x in values]))
    assert here.low <= here.high and min(values) - 1e-9 <= here.value <= max(values) + 1e-9
    np.testing.assert_allclose([there.value, there.low, there.high], np.array([here.value, here.low, here.high]) + shift, atol=1e-6)


@given(scores, scores)
def test_either_one_or_the_other_is_better(a, b):
    assert probability_of_improvement(a, b, draws=50).value == pytest.approx(1 - probability_of_improvement(b, a, draws=50).value)
    assert difference(a, b, draws=50).value == pytest.approx(-difference(b, a, draws=50).value)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_stays_between_none_and_all(pair):
    found = wilson(*pair)
    assert 0 <= found.low <= found.value + 1e-12 and found.value - 1e-12 <= found.high <= 1


def test_known_answers():
    assert interquartile_mean(range(8)) == 3.5 and interquartile_mean([0, 0, 0, 100]) == 0
    assert (wilson(5, 10).low, wilson(5, 10).high) == pytest.approx((0.2366, 0.7634), abs=1e-4)


@pytest.mark.parametrize("bad", [{}, {"a": []}, {"a": [1.0, float("nan")]}])
def test_no_scores_and_no_numbers_are_errors(bad):
    with pytest.raises(ValueError, match="score"):
        stratified_bootstrap(bad)
    with pytest.raises(ValueError, match="3 successes of 2 trials"):
        wilson(3, 2)
