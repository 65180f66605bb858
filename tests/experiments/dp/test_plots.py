import matplotlib.image
import pytest

from experiments.dp import plots


def row(step, epsilon):
    return {
        "step": step,
        "train_accuracy": None if step == 2 else 0.5,
        "test_accuracy": 0.4,
        "epsilon": epsilon,
    }


@pytest.mark.parametrize("epsilons", [[1.0, 2.0, 3.0], [None, None], [0.5]])
def test_draws_a_png(tmp_path, epsilons):
    path = tmp_path / "accuracy.png"
    path.write_text("an older picture")
    plots.accuracy_and_epsilon([row(i + 1, e) for i, e in enumerate(epsilons)], path)
    pixels_HxWxC = matplotlib.image.imread(path)
    assert pixels_HxWxC.shape[:2] == (600, 960)
    assert pixels_HxWxC.std() > 0.05
    assert [entry.name for entry in tmp_path.iterdir()] == ["accuracy.png"]
