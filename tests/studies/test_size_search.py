"""The search of a size by its cost, by hand."""

from studies.comparison.matching import geometric_sizes, interpolate_size, nearest_size, ratio_of_medians


def test_sizes_by_hand():
    assert nearest_size(lambda n: 10.0 * n, 44.0, 1, 64) == 4
    assert nearest_size(lambda n: 10.0 * n, 46.0, 1, 64) == 5
    assert nearest_size(lambda n: 10.0 * n, 1e9, 1, 64) == 64
    assert nearest_size(lambda n: 10.0 * n, 0.0, 1, 64) == 1
    assert geometric_sizes(1, 64, 4) == [1, 4, 16, 64]
    assert geometric_sizes(1, 3, 6) == [1, 2, 3]
    assert interpolate_size([1, 4], [10.0, 16.0], 12.0) == 2
    assert interpolate_size([1, 4], [10.0, 16.0], 99.0) == 4
    assert interpolate_size([1, 4, 16], [10.0, 10.0, 16.0], 9.9) == 4, (
        "a head that is too slow at any size keeps the largest of its cheapest sizes"
    )


def test_a_ratio_of_medians_and_its_interval():
    """A disturbance that both sides share does not widen the interval; one of a single side does."""
    noise = [1.0, 5.0, 2.0, 1.5, 3.0, 1.1, 2.2]
    ratio, (low, high) = ratio_of_medians([2 * one for one in noise], noise, seed=0)
    assert ratio == low == high == 2.0
    _, (low, high) = ratio_of_medians(noise, noise[::-1], seed=0)
    assert low < 1 < high
