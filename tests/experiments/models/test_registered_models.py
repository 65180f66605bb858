"""What holds for every model that has a name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from experiments.models import registry

MNIST, CIFAR, LSUN = (28, 28, 1), (32, 32, 3), (256, 256, 3)

# Lee & Kifer 2021's architectures; in a ResNet, trainable and frozen together.
AS_IN_THE_PAPER = [
    ("mlp", MNIST, 10, 136_074),
    ("mlp", CIFAR, 10, 428_938),
    ("cnn", MNIST, 10, 129_388),
    ("cnn", CIFAR, 10, 187_988),
    ("rnn", MNIST, 10, 21_514),
    ("rnn", CIFAR, 10, 30_218),
    ("lstm", MNIST, 10, 82_186),
    ("lstm", CIFAR, 10, 117_002),
    ("transformer", (512,), 2, 483_002),
    ("transformer:layers=3", (512,), 2, 483_002 + 2 * 482_600),
    ("resnet18", LSUN, 10, 11_171_466 + 7_680),
    ("resnet34", LSUN, 10, 21_272_202 + 15_104),
    ("resnet50", LSUN, 10, 23_480_714 + 45_312),
    ("resnet101", LSUN, 10, 42_420_618 + 97_536),
    ("vgg11", LSUN, 10, 128_807_306),
    ("vgg13", LSUN, 10, 128_991_818),
    ("vgg16", LSUN, 10, 134_301_514),
    ("vgg19", LSUN, 10, 139_611_210),
]
OTHERS = [
    ("tempered_cnn", MNIST, 10, 26_010),
    ("transformer:embeddings=trained", (512,), 2, 483_002 + 8192 * 200),
    ("transformer:layers=3:scan=true", (512,), 2, 483_002 + 2 * 482_600),
    ("transformer:layers=3:scan=true:remat=true", (512,), 2, 483_002 + 2 * 482_600),
    ("resnet18:norm=frozen", LSUN, 10, 11_169_546),
    ("resnet34:norm=frozen", LSUN, 10, 21_270_282),
    ("resnet50:norm=frozen", LSUN, 10, 23_472_906),
    ("resnet101:norm=frozen", LSUN, 10, 42_412_810),
    ("vgg11:norm=group", LSUN, 10, 128_807_306 + 5_504),
    ("vgg13:norm=group", LSUN, 10, 128_991_818 + 5_888),
    ("vgg16:norm=group", LSUN, 10, 134_301_514 + 8_448),
    ("vgg19:norm=group", LSUN, 10, 139_611_210 + 11_008),
    ("vgg19:norm=frozen", LSUN, 10, 139_611_210),
]

# Small ones of every name, and images that each of them takes.
SMALL = {
    "mlp": "mlp:hidden_sizes=8",
    "cnn": "cnn:channels=3-4:hidden_size=8",
    "tempered_cnn": "tempered_cnn",
    "rnn": "rnn:width=8",
    "lstm": "lstm:width=8",
    "transformer": "transformer:width=8:heads=2:vocabulary_size=30",
    "resnet18": "resnet18:blocks=1-1:width=4:stem=small",
    "resnet34": "resnet34:blocks=2-1:width=4:norm=frozen",
    "resnet50": "resnet50:blocks=1-1:width=4:stem=small:norm=frozen",
    "resnet101": "resnet101:blocks=1-1:width=4",
    "vgg11": "vgg11:blocks=1-1:width=2:norm=group",
    "vgg13": "vgg13:blocks=2-1:width=2:norm=frozen",
    "vgg16": "vgg16:blocks=1-1-1:width=2",
    "vgg19": "vgg19:blocks=1-1:width=2",
}


def inputs_like(spec, input_shape, batch_size):
    if registry.input_kind(spec) == "tokens":
        return jax.random.randint(jax.random.key(1), (batch_size, *input_shape), 0, 30)
    return jax.random.uniform(jax.random.key(1), (batch_size, *input_shape))


@pytest.mark.parametrize(
    ("spec", "input_shape", "num_classes", "expected"), AS_IN_THE_PAPER + OTHERS
)
def test_number_of_parameters(spec, input_shape, num_classes, expected):
    model = registry.build(spec, input_shape, num_classes)
    inputs = jax.eval_shape(lambda: inputs_like(spec, input_shape, 2))
    logits, params = jax.eval_shape(model.init_with_output, jax.random.key(0), inputs)
    assert params.keys() == {"params"}, "other collections would not be clipped"
    assert registry.num_parameters(params) == expected
    assert logits.shape == (2, num_classes)


@pytest.mark.parametrize("name", registry.MODELS)
def test_examples_do_not_mix_and_every_parameter_counts(name, random_params):
    spec = SMALL[name]
    input_shape = (12,) if registry.input_kind(spec) == "tokens" else (16, 16, 1)
    model = registry.build(spec, input_shape, num_classes=3)
    inputs_B = inputs_like(spec, input_shape, 3)

    @jax.jit
    def run(params, inputs_B):
        def sum_and_logits(params):
            logits_BxV = model.apply(params, inputs_B)
            return logits_BxV[:, 0].sum(), logits_BxV

        return jax.grad(sum_and_logits, has_aux=True)(params)

    params = random_params(model, inputs_B)
    grads, logits_BxV = run(params, inputs_B)
    assert logits_BxV.shape == (3, 3)
    assert not jnp.allclose(logits_BxV[0], logits_BxV[1], rtol=1e-3), "inputs count"
    for path, leaf in jax.tree.leaves_with_path(grads):
        assert jnp.any(leaf != 0), jax.tree_util.keystr(path)
    # Other neighbours, another place in the batch.
    _, changed_BxV = run(params, np.asarray(inputs_B)[[2, 0, 2]])
    np.testing.assert_allclose(changed_BxV[1], logits_BxV[0], rtol=1e-4, atol=1e-5)


# Shrunk, the deeper ones hold nothing that these do not.
@pytest.mark.parametrize(
    "name", sorted(set(registry.MODELS) - {"resnet34", "resnet101", "vgg16", "vgg19"})
)
def test_clipped_gradients_and_norms(
    name, random_params, float64_reference, assert_clipped_sum
):
    spec = SMALL[name]
    input_shape = (12,) if registry.input_kind(spec) == "tokens" else (16, 16, 1)
    model = registry.build(spec, input_shape, num_classes=3)
    inputs_B = inputs_like(spec, input_shape, 3)
    params = random_params(model, inputs_B)

    def loss(params, inputs_B, labels_B):
        logits_BxV = model.apply(params, inputs_B)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_BxV, labels_B
        ).mean()

    batch = (np.asarray(inputs_B), np.arange(3))
    reference = float64_reference(loss, params, batch)

    @jax.jit
    def run(params, *batch):
        return {
            method: dpjax.clipped_grad(
                loss,
                l2_clip_norm=reference.clip_norm,
                batch_argnums=(1, 2),
                return_grad_norms=True,
                method=method,
                strict=True,
            )(params, *batch)
            for method in ("bookkeeping", "reweight")
        }

    for clipped_sum, aux in run(params, *batch).values():
        np.testing.assert_allclose(aux.grad_norms, reference.norms_B, rtol=1e-5)
        assert_clipped_sum(clipped_sum, reference, 1e-5)
