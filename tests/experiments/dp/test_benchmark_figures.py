import matplotlib.image
import pytest

from experiments.dp import benchmark_config, benchmark_figures
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_methods import METHODS
from experiments.dp.measuring import Result
from experiments.timing import Spread


def result(method, ratio):
    if ratio is None:
        return Result(method, "MemoryError: no")
    return Result(
        method,
        step_seconds=Spread(1e-3 * ratio, 0.9e-3 * ratio, 1.1e-3 * ratio),
        step_ratio=Spread(ratio, ratio, ratio),
        compile_seconds=ratio,
        compile_ratio=ratio,
        temp_bytes=int(1e6 * ratio),
        temp_ratio=ratio,
        largest_batch=int(1e4 / ratio),
        largest_batch_ratio=1 / ratio,
    )


def cell(spec, *ratios):
    methods = zip(METHODS, ratios, strict=False)
    return spec, [result(method, ratio) for method, ratio in methods]


def mlp(batch_size):
    return CellSpec("mlp", (8, 8, 1), batch_size)


@pytest.mark.parametrize("figure", benchmark_config.FIGURES)
@pytest.mark.parametrize(
    "measured",
    [
        [cell(mlp(1), 1.0)],
        [cell(mlp(1), None, None)],
        [
            cell(mlp(1), 1.0, 0.9, 120.0, None),
            cell(mlp(2), 1.0, 0.98),
            cell(CellSpec("transformer", (64,), 3), 1.0, 2000.0, *[3.0] * 8),
        ],
    ],
)
def test_draws_whatever_was_measured(tmp_path, figure, measured):
    path = tmp_path / "figure.png"
    benchmark_figures.draw(figure, measured, path)
    assert matplotlib.image.imread(path).std() > 0.02


def drawn(monkeypatch, figure, measured):
    saved = []
    monkeypatch.setattr(
        benchmark_figures.plots, "save", lambda figure, path: saved.append(figure)
    )
    benchmark_figures.draw(figure, measured, None)
    return [ax for ax in saved[0].axes if ax.axison]


def points(ax):
    return {
        str(line.get_label()): list(zip(*line.get_data(), strict=True))
        for line in ax.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def test_lines_over_the_batch_size_have_a_panel_for_each_model(monkeypatch):
    measured = [
        cell(mlp(32), 3.0, 4.0),
        cell(CellSpec("cnn", (8, 8, 1), 8), 1.0, 1.0),
        cell(mlp(8), 1.0, None),
    ]
    axes = drawn(monkeypatch, "batch_size", measured)
    assert [ax.get_title() for ax in axes] == ["mlp 8x8x1", "cnn 8x8x1"]
    assert points(axes[0]) == {
        "nonprivate": [(8, 1.0), (32, 3.0)],
        "noise_only": [(32, 4.0)],
    }
    assert axes[0].get_xscale() == axes[0].get_yscale() == "log"


def test_lines_over_the_depth_have_a_panel_for_each_family(monkeypatch):
    specs = [
        CellSpec(f"{name}:width=16", (32, 32, 3), 16)
        for name in ("resnet18", "resnet34", "vgg11")
    ]
    measured = [cell(spec, float(i)) for i, spec in enumerate(specs, start=1)]
    resnet, vgg = drawn(monkeypatch, "depth", measured)
    assert points(resnet) == {"nonprivate": [(0, 1.0), (1, 2.0)]}
    labels = [label.get_text() for label in resnet.get_xticklabels()]
    assert labels == ["resnet18", "resnet34"]
    assert points(vgg) == {"nonprivate": [(0, 3.0)]}


def test_lines_over_the_image_size(monkeypatch):
    specs = [CellSpec("cnn", (size, size, 3), 4) for size in (16, 32)]
    measured = [cell(spec, float(i)) for i, spec in enumerate(specs, start=1)]
    (ax,) = drawn(monkeypatch, "image_size", measured)
    assert points(ax) == {"nonprivate": [(16, 1.0), (32, 2.0)]}


def test_methods_differ_in_colour_and_marker():
    for values in zip(*benchmark_figures._STYLES.values(), strict=True):
        assert len(set(values)) == len(METHODS)


def test_memory_has_two_panels_for_each_cell(monkeypatch):
    axes = drawn(monkeypatch, "memory", [cell(mlp(1), 1.0, 4.0)])
    labels = [ax.get_xlabel() for ax in axes]
    assert labels == ["temporary memory / non-private", "largest batch / non-private"]
    texts = [[text.get_text().strip() for text in ax.texts] for ax in axes]
    assert texts == [["4 (4 MB)"], ["0.25 (2,500)"]]
