import hypothesis
import numpy as np
import pytest
import scipy.stats
from hypothesis import strategies as st

from experiments.extraction import cluster_statistics
from experiments.extraction.cluster_statistics import LogLinearFit, NoFit


@st.composite
def clustered(draw, num_groups=3):
    """Verdicts of windows in clusters and groups; every group has a window."""
    num_windows = draw(st.integers(num_groups, 40))
    integers = st.lists(
        st.integers(0, 9), min_size=num_windows, max_size=num_windows
    ).map(np.array)
    groups_N = draw(integers) % num_groups
    groups_N[:num_groups] = np.arange(num_groups)
    return draw(integers) % 2, draw(integers), groups_N


def one_group(values_N, clusters_N):
    return cluster_statistics.cluster_totals(
        np.asarray(values_N), np.asarray(clusters_N), np.zeros(len(values_N), int), 1
    )


def ends(intervals):
    return np.stack([intervals.mean_K, intervals.lower_K, intervals.upper_K])


@hypothesis.given(clustered())
def test_totals_are_those_of_a_count_by_hand(data):
    values_N, clusters_N, groups_N = data
    totals = cluster_statistics.cluster_totals(values_N, clusters_N, groups_N, 3)
    for group in range(3):
        inside_N = groups_N == group
        assert totals.num_windows_G[group] == inside_N.sum()
        assert totals.num_clusters_G[group] == len(set(clusters_N[inside_N]))
        assert totals.means_G[group] == values_N[inside_N].sum() / inside_N.sum()
    rows = {}
    for cluster in set(clusters_N):
        inside_N = clusters_N == cluster
        windows_G = np.bincount(groups_N[inside_N], minlength=3)
        values_G = np.bincount(groups_N[inside_N], values_N[inside_N], minlength=3)
        row = (*values_G, *windows_G)
        rows[row] = rows.get(row, 0) + 1
    found = np.concatenate(
        [totals.values_PxG.toarray(), totals.windows_PxG.toarray()], axis=1
    )
    assert dict(zip(map(tuple, found), totals.clusters_P, strict=True)) == rows


@pytest.mark.parametrize(
    ("values_N", "groups_N"), [([1.5], [0]), ([-1], [0]), ([np.nan], [0]), ([1], [1])]
)
def test_impossible_values_and_empty_groups_are_refused(values_N, groups_N):
    with pytest.raises(ValueError, match=r"a value outside|a group without"):
        cluster_statistics.cluster_totals(
            np.array(values_N), [0], np.array(groups_N), 2
        )


@hypothesis.given(st.integers(1, 80), st.data())
def test_the_interval_is_wilsons_if_every_cluster_has_one_window(num_windows, data):
    hits = data.draw(st.integers(0, num_windows))
    values_N = np.arange(num_windows) < hits
    found = cluster_statistics.intervals(one_group(values_N, np.arange(num_windows)))
    wilson = scipy.stats.binomtest(hits, num_windows).proportion_ci(method="wilson")
    expected = [hits / num_windows, wilson.low, wilson.high]
    np.testing.assert_allclose(ends(found)[:, 0], expected, atol=1e-12)


@hypothesis.given(clustered())
def test_an_interval_has_a_width_and_holds_the_mean(data):
    found = cluster_statistics.intervals(cluster_statistics.cluster_totals(*data, 3))
    assert np.all(found.lower_K >= 0)
    assert np.all(found.upper_K <= 1)
    assert np.all(found.lower_K <= found.mean_K)
    assert np.all(found.mean_K <= found.upper_K)
    assert np.all(found.upper_K - found.lower_K > 0.01)
    assert np.all(found.lower_K[found.mean_K == 0] == 0)
    assert np.all(found.upper_K[found.mean_K == 1] == 1)


@hypothesis.given(clustered(), st.integers(2, 5))
def test_copies_of_the_windows_of_a_cluster_say_nothing_new(data, num_copies):
    once = cluster_statistics.intervals(cluster_statistics.cluster_totals(*data, 3))
    copies = (np.tile(array_N, num_copies) for array_N in data)
    often = cluster_statistics.intervals(cluster_statistics.cluster_totals(*copies, 3))
    np.testing.assert_allclose(ends(often), ends(once), atol=1e-12)


@hypothesis.given(clustered(), st.randoms(use_true_random=False))
def test_neither_order_nor_the_names_of_clusters_matter(data, random):
    before = cluster_statistics.intervals(cluster_statistics.cluster_totals(*data, 3))
    values_N, clusters_N, groups_N = data
    names = random.sample(range(-(10**12), 10**12), 10)
    order = random.sample(range(len(values_N)), len(values_N))
    after = cluster_statistics.intervals(
        cluster_statistics.cluster_totals(
            values_N[order], np.array(names)[clusters_N][order], groups_N[order], 3
        )
    )
    np.testing.assert_allclose(ends(after), ends(before), atol=1e-12)


@hypothesis.given(clustered())
def test_failures_are_successes_upside_down(data):
    values_N, *rest = data
    found = cluster_statistics.intervals(
        cluster_statistics.cluster_totals(values_N, *rest, 3)
    )
    flipped = cluster_statistics.intervals(
        cluster_statistics.cluster_totals(1 - values_N, *rest, 3)
    )
    np.testing.assert_allclose(flipped.lower_K, 1 - found.upper_K, atol=1e-12)
    np.testing.assert_allclose(flipped.upper_K, 1 - found.lower_K, atol=1e-12)


def test_nothing_extracted_says_less_the_fewer_the_clusters():
    uppers = [
        cluster_statistics.intervals(
            one_group(np.zeros(60), np.arange(60) // size)
        ).upper_K[0]
        for size in (1, 2, 6, 30, 60)
    ]
    assert uppers == sorted(uppers)
    # 60 windows in 10 clusters count as 10.
    wilson = scipy.stats.binomtest(0, 10).proportion_ci(method="wilson")
    assert uppers[2] == pytest.approx(wilson.high)


def test_the_interval_holds_the_truth_where_windows_are_alike():
    rng = np.random.default_rng(0)
    held, held_if_independent = [], []
    for _ in range(300):
        # Passages of 1 to 20 windows, nearly all or nearly none of them extracted.
        sizes_C = rng.integers(1, 21, 40)
        clusters_N = np.repeat(np.arange(40), sizes_C)
        values_N = rng.random(len(clusters_N)) < rng.beta(0.06, 0.24, 40)[clusters_N]
        for names_N, outcome in (
            (clusters_N, held),
            (np.arange(len(values_N)), held_if_independent),
        ):
            found = cluster_statistics.intervals(one_group(values_N, names_N))
            outcome.append(found.lower_K[0] <= 0.2 <= found.upper_K[0])
    assert np.mean(held) > 0.92
    assert np.mean(held_if_independent) < 0.6


@hypothesis.given(clustered())
def test_an_average_weighs_groups_and_not_windows(data):
    totals = cluster_statistics.cluster_totals(*data, 3)
    mix_GxK = np.array([[1 / 3, 1.0], [1 / 3, 0], [1 / 3, 0]])
    found = cluster_statistics.intervals(totals, mix_GxK)
    np.testing.assert_allclose(found.mean_K[0], totals.means_G.mean(), atol=1e-12)
    alone = cluster_statistics.intervals(totals)
    np.testing.assert_allclose(ends(found)[:, 1], ends(alone)[:, 0], rtol=0, atol=1e-12)


def all_draws(values_C, windows_C):
    """The mean of every draw of 3 clusters out of 3, each as likely as any other."""
    draws = np.stack(np.meshgrid(*[range(3)] * 3), axis=-1).reshape(-1, 3)
    return values_C[draws].sum(1) / windows_C[draws].sum(1)


@pytest.mark.parametrize("multinomial_cost", [0, 10**9])
def test_resamples_are_draws_of_whole_clusters(monkeypatch, multinomial_cost):
    monkeypatch.setattr(cluster_statistics, "_MULTINOMIAL_COST", multinomial_cost)
    # Several parts, the last one short.
    monkeypatch.setattr(cluster_statistics, "_CHUNK", 3 * 4_999)
    totals = one_group([1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 2, 2])
    found_R = cluster_statistics.resampled_means(totals, num_resamples=20_000)[:, 0]
    expected = all_draws(np.array([2, 1, 0]), np.array([2, 2, 2]))
    values, counts = np.unique(expected, return_counts=True)
    found, found_counts = np.unique(found_R, return_counts=True)
    np.testing.assert_allclose(found, values)
    np.testing.assert_allclose(found_counts / 20_000, counts / 27, atol=0.015)


def test_one_draw_serves_all_groups():
    """Two models with the same verdicts on the same windows never differ."""
    rng = np.random.default_rng(0)
    values_N, clusters_N = rng.random(200) < 0.3, rng.integers(20, size=200)
    totals = cluster_statistics.cluster_totals(
        np.tile(values_N, 2), np.tile(clusters_N, 2), np.repeat([0, 1], 200), 2
    )
    means_RxG = cluster_statistics.resampled_means(totals, num_resamples=50)
    np.testing.assert_array_equal(means_RxG[:, 0], means_RxG[:, 1])
    assert np.ptp(means_RxG[:, 0]) > 0
    fit = cluster_statistics.log_linear_fit(np.array([1, 10]), totals)
    assert (fit.slope, fit.slope_interval) == (0, None)


def test_an_average_is_taken_over_the_groups_that_a_resample_has():
    totals = cluster_statistics.cluster_totals(
        np.array([1, 0]), np.array([0, 1]), np.array([0, 1]), 2
    )
    mix_GxK = np.array([[0.5, 1.0], [0.5, 0.0]])
    means_RxK = cluster_statistics.resampled_means(totals, mix_GxK, num_resamples=60)
    assert set(means_RxK[:, 0]) == {0.0, 0.5, 1.0}
    missed_R = means_RxK[:, 0] == 0
    assert np.all(np.isnan(means_RxK[:, 1]) == missed_R)
    assert np.all(means_RxK[~missed_R, 1] == 1)


def test_the_seed_decides_the_resamples():
    totals = one_group(np.arange(30) % 2, np.arange(30))
    first, again, other = (
        cluster_statistics.resampled_means(totals, num_resamples=9, seed=s)
        for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


fractions = st.lists(st.floats(0, 1), min_size=2, max_size=8)


@hypothesis.given(fractions, st.data())
def test_the_line_is_that_of_least_squares(y, data):
    x = data.draw(
        st.lists(st.integers(1, 10**10), min_size=len(y), max_size=len(y), unique=True)
    )
    hypothesis.assume(np.ptp(np.log10(x)) > 1e-3)
    hypothesis.assume(np.ptp(y) > 1e-6)
    fit = cluster_statistics.least_squares(np.array(x), np.array(y))
    slope, intercept = np.polyfit(np.log10(x), y, 1)
    np.testing.assert_allclose(fit.slope, slope, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(fit.intercept, intercept, rtol=1e-6, atol=1e-7)
    correlation = np.corrcoef(np.log10(x), y)[0, 1]
    np.testing.assert_allclose(fit.r_squared, correlation**2, atol=1e-6)


@hypothesis.given(st.floats(-1, 1), st.floats(-1, 1))
def test_points_on_a_line_give_the_line(slope, intercept):
    x = np.array([50, 100, 300, 450])
    fit = cluster_statistics.least_squares(x, intercept + slope * np.log10(x))
    np.testing.assert_allclose(
        [fit.slope, fit.intercept], [slope, intercept], atol=1e-9
    )
    np.testing.assert_allclose(fit(x), intercept + slope * np.log10(x), atol=1e-9)
    if abs(slope) > 1e-6:
        assert fit.r_squared == pytest.approx(1)


@pytest.mark.parametrize("value", [0, 0.25, 1])
def test_a_flat_series_has_slope_0_and_explains_nothing(value):
    x, y = np.array([1, 7, 50]), np.full(3, value)
    assert cluster_statistics.least_squares(x, y) == LogLinearFit(3, 0.0, value, 0.0)


def test_no_interval_without_resamples_that_say_something():
    groups_N = np.repeat([0, 1], 5)
    flat = cluster_statistics.cluster_totals(np.zeros(10), np.arange(10), groups_N, 2)
    one_cluster = cluster_statistics.cluster_totals(groups_N, np.zeros(10), groups_N, 2)
    # Each point rests on one cluster: half of the resamples miss one.
    two = cluster_statistics.cluster_totals(groups_N, groups_N, groups_N, 2)
    for totals in (flat, one_cluster, two):
        fit = cluster_statistics.log_linear_fit(np.array([1, 10]), totals)
        assert isinstance(fit, LogLinearFit)
        assert fit.slope_interval is None


@pytest.mark.parametrize(
    ("x", "reason"), [([5], "fewer than two points"), ([5, 5], "all points at one x")]
)
def test_no_line_through_one_point_or_one_x(x, reason):
    groups_N = np.arange(2 * len(x)) % len(x)
    totals = cluster_statistics.cluster_totals(
        groups_N * 0, np.arange(len(groups_N)), groups_N, len(x)
    )
    assert cluster_statistics.log_linear_fit(np.array(x), totals) == NoFit(reason)


def test_the_interval_of_a_slope_is_as_wide_as_the_slope_varies():
    """Over new samples of passages, the slope varies as over resamples of one."""
    x, slopes, widths = np.array([10, 100, 1000]), [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        clusters_N, groups_N = np.repeat(np.arange(60), 5), rng.integers(3, size=300)
        chance_N = 0.2 + 0.2 * groups_N + rng.uniform(-0.2, 0.2, 60)[clusters_N]
        totals = cluster_statistics.cluster_totals(
            rng.random(300) < chance_N, clusters_N, groups_N, 3
        )
        fit = cluster_statistics.log_linear_fit(x, totals, num_resamples=200, seed=seed)
        slopes.append(fit.slope)
        widths.append(fit.slope_interval[1] - fit.slope_interval[0])
    assert np.mean(slopes) == pytest.approx(0.2, abs=0.01)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * np.std(slopes), rel=0.25)
