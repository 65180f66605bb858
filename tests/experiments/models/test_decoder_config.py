import dataclasses

import pytest

from experiments.models import decoder_config


def test_sizes_of_the_smallest_published_ones():
    config = decoder_config.gpt2(50257, 1024)
    assert (config.num_layers, config.width, config.head_dim) == (12, 768, 64)
    assert config.feed_forward == 3072
    assert decoder_config.gpt2(9, 9, feed_forward=5).feed_forward == 5


def test_every_other_layer_is_local():
    config = decoder_config.gpt_neo(9, 9, layers=5)
    assert config.windows == (None, 256, None, 256, None)
    assert decoder_config.gpt_neo(9, 9, layers=2, window=3).windows == (None, 3)


@pytest.mark.parametrize("build", [decoder_config.gpt_j, decoder_config.gpt_neox])
@pytest.mark.parametrize(("head_dim", "expected"), [(2, 2), (8, 2), (12, 2), (64, 16)])
def test_a_quarter_of_each_head_is_rotated(build, head_dim, expected):
    assert build(9, 9, width=3 * head_dim, heads=3).rotary_dim == expected
    assert build(9, 9, width=24, heads=3, rotary_dim=8).rotary_dim == 8


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (decoder_config.gpt2, {"heads": 5}, "heads=5 does not divide width=768"),
        (decoder_config.gpt_j, {"rotary_dim": 3}, "rotary_dim=3 is not an even"),
        (decoder_config.gpt_j, {"rotary_dim": 66}, "from 2 to 64, the size of a head"),
        (decoder_config.gpt_neox, {"width": 12}, "rotary_dim=2 .* from 2 to 1"),
    ],
)
def test_sizes_that_do_not_fit(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(9, 9, **options)


def test_as_many_windows_as_layers():
    with pytest.raises(ValueError, match=r"1 layers .* there are 12"):
        dataclasses.replace(decoder_config.gpt2(9, 9), windows=(None,))
