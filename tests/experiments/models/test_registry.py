import jax
import jax.numpy as jnp
import pytest

from experiments.errors import UsageError
from experiments.models import registry

IMAGE = (28, 28, 1)
SHAPES = {"image": IMAGE, "tokens": (8,)}


def test_options_are_arguments_of_the_builder():
    mlp = registry.build("mlp:hidden_sizes=32-16:activation=tanh", IMAGE, 10)
    assert (mlp.hidden_sizes, mlp.activation) == ((32, 16), "tanh")
    cnn = registry.build("cnn:channels=3-4-5:kernel_size=3:hidden_size=6", IMAGE, 10)
    assert [layer.channels for layer in cnn.layers] == [3, 4, 5]
    assert {layer.kernel_size for layer in cnn.layers} == {3}
    assert cnn.hidden_size == 6


def test_yes_and_no():
    for scan in (True, False):
        spec = f"transformer:scan={str(scan).lower()}:remat=true"
        model = registry.build(spec, (8,), num_classes=2)
        assert (model.scan, model.remat) == (scan, True)
    with pytest.raises(UsageError, match="scan='True', expected one of true, false"):
        registry.build("transformer:scan=True", (8,), num_classes=2)


def test_one_entry_is_a_tuple_too():
    assert registry.build("mlp:hidden_sizes=7", IMAGE, 10).hidden_sizes == (7,)


@pytest.mark.parametrize("name", registry.MODELS)
def test_every_model_says_what_it_takes(name):
    kind = registry.input_kind(name)
    assert registry.input_kind(f"{name}:width=8") == kind
    (other,) = SHAPES.keys() - {kind}
    with pytest.raises(UsageError, match=rf"model='{name}' takes inputs.*\({kind}\)"):
        registry.build(name, SHAPES[other], num_classes=10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cnnn", r"'cnnn' is unknown \(did you mean 'cnn'\?\): expected one of mlp"),
        ("", "model='' is unknown: expected one of mlp, cnn"),
        ("mlp:width=3", "option 'width=3', expected .* hidden_sizes, activation"),
        ("mlp:hiden_sizes=3", "did you mean 'hidden_sizes'"),
        ("mlp:hidden_sizes", "option 'hidden_sizes', expected OPTION=VALUE"),
        ("mlp:", "option '', expected OPTION=VALUE"),
        ("tempered_cnn:width=3", "option 'width=3', .*this model has none"),
        ("mlp:hidden_sizes=3:hidden_sizes=4", "sets 'hidden_sizes' twice"),
        ("mlp:hidden_sizes=3,4", "'3,4', expected integers >= 1 with hyphens"),
        ("mlp:hidden_sizes=3-", "'3-', expected integers >= 1 with hyphens"),
        ("mlp:hidden_sizes=0", "'0', expected integers >= 1"),
        ("mlp:hidden_sizes=-5", "'-5', expected integers >= 1"),
        ("mlp:activation=swish", "'swish', expected one of relu, sigmoid, tanh"),
        ("cnn:hidden_size=1.5", "'1.5', expected an integer >= 1"),
    ],
)
def test_wrong_spec(spec, message):
    with pytest.raises(UsageError, match=message) as error:
        registry.build(spec, IMAGE, num_classes=10)
    assert "\n" not in str(error.value)


def test_images_too_small():
    with pytest.raises(UsageError, match=r"tempered_cnn.*does not fit.*\(8, 8, 1\)"):
        registry.build("tempered_cnn", (8, 8, 1), num_classes=10)


def test_parameters_are_counted_without_being_made():
    model = registry.build("mlp:hidden_sizes=100000-100000", IMAGE, num_classes=10)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *IMAGE)))
    expected = 785 * 100_000 + 100_001 * 100_000 + 100_001 * 10
    assert registry.num_parameters(params) == expected
