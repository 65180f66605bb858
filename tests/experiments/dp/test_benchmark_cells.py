import pytest

from experiments.dp import benchmark_cells
from experiments.dp.benchmark_cells import CellSpec
from experiments.errors import UsageError

METHODS = ("auto", "vmap", "multi_loss")


def test_reads_images_tokens_and_what_is_left_out():
    assert benchmark_cells.parse("resnet18:width=16@32x24x3@16", METHODS) == CellSpec(
        "resnet18:width=16", (32, 24, 3), 16
    )
    assert benchmark_cells.parse("transformer@512@1", METHODS) == CellSpec(
        "transformer", (512,), 1
    )
    without = benchmark_cells.parse("cnn@8x8x1@4@without=vmap+multi_loss", METHODS)
    assert without.without == ("vmap", "multi_loss")
    assert str(without) == "cnn 8x8x1, batch 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlp", "expected MODEL@SHAPE@BATCH"),
        ("@8x8x1@4", "expected MODEL@SHAPE@BATCH"),
        ("mlp@8x8x1", "expected MODEL@SHAPE@BATCH"),
        ("mlp@8x8x1@4@without=vmap@5", "expected MODEL@SHAPE@BATCH"),
        ("mlp@8x0x1@4", "expected sizes >= 1 with x between.*not 8x0x1"),
        ("mlp@8X8@4", "expected sizes >= 1"),
        ("mlp@@4", "expected sizes >= 1"),
        ("mlp@8x8x1@0", "expected a batch size >= 1, not 0"),
        ("mlp@8x8x1@-4", "expected a batch size >= 1, not -4"),
        ("mlp@8x8x1@²", "expected a batch size >= 1"),
        ("mlp@8x8x1@4@vmap", "expected without=METHOD.METHOD of auto.*not vmap"),
        ("mlp@8x8x1@4@without=", "expected without="),
        ("mlp@8x8x1@4@without=vmap+ghost", "not without=vmap.ghost"),
    ],
)
def test_says_which_part_is_wrong(text, message):
    with pytest.raises(UsageError, match=message) as error:
        benchmark_cells.parse(text, METHODS)
    assert repr(text) in str(error.value)
    assert "--config.cells" in str(error.value)
