import pytest
from scipy.stats import t

from depthlaw.scaling.student import student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 5, 12, 100, 2000])
@pytest.mark.parametrize("probability", [0.001, 0.025, 0.5, 0.9, 0.975, 0.995])
def test_quantiles_of_students_t_are_those_of_scipy(freedom, probability):
    assert student_quantile(probability, freedom) == pytest.approx(t.ppf(probability, freedom), rel=5e-5, abs=1e-6)
