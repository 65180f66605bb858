"""Two steps of every config that trains without a download."""

import dataclasses
import pathlib

import jax
import pytest
from ml_collections.config_flags import config_flags

from experiments import run_folder
from experiments.dp import plan, train, train_config
from experiments.errors import RunError, UsageError
from experiments.models import registry

CONFIGS = pathlib.Path(train_config.__file__).parent / "configs"

# What makes each of them small; the architecture stays.
SMALL = {
    "digits_cnn": {"model": "cnn:channels=2-3:hidden_size=8"},
    "digits_lstm": {"model": "lstm:width=6"},
    "digits_mlp": {"model": "mlp:hidden_sizes=8"},
    "digits_resnet": {"model": "resnet18:blocks=1:width=4:stem=small"},
    "digits_rnn": {"model": "rnn:width=6"},
    "digits_vgg": {"model": "vgg11:blocks=1-1:width=1"},
    "stdlib_transformer": {
        "model": "transformer:width=8:heads=2",
        "sequence_length": 16,
    },
}

# ml_collections loads config files by a deprecated function.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


def load(name):
    flag_values = config_flags.flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", flag_values=flag_values)
    flag_values(["program", f"--config={CONFIGS / name}.py"])
    return train_config.parse(flag.value)


@pytest.fixture(autouse=True, scope="module")
def cheap_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_every_config_without_a_download_is_here():
    names = {path.stem for path in CONFIGS.glob("*.py")}
    assert {n for n in names if n.startswith(("digits_", "stdlib_"))} == SMALL.keys()


@pytest.mark.parametrize("name", SMALL)
def test_two_steps(name, tmp_path):
    config = load(name)
    small = dataclasses.replace(
        config,
        **SMALL[name],
        batch_size=16,
        physical_batch_size=24,
        num_steps=2,
        log_interval=1,
        out=str(tmp_path / "run"),
        seed=1,
    )
    assert small.model.partition(":")[0] == config.model.partition(":")[0]
    train.train(small)
    first, second = run_folder.read_metrics(tmp_path / "run")
    assert 0 < first["epsilon"] < second["epsilon"] <= config.epsilon
    assert second["loss"] > 0
    assert 0 <= second["test_accuracy"] <= 1


@pytest.mark.parametrize("name", SMALL)
def test_the_config_as_it_is_fits_its_data(name):
    config = load(name)
    made = plan.make_plan(config)
    num_examples = made.dataset.num_train
    assert config.delta < 1 / num_examples
    assert made.num_parameters < 500_000, "minutes on two cores"


def plan_for(**changes):
    config = train_config.TrainConfig(noise_multiplier=1.0, batch_size=16)
    return plan.make_plan(dataclasses.replace(config, **changes))


def test_texts_want_a_model_of_texts():
    message = r"model='mlp' takes inputs of shape \(H, W, C\).*\(256,\).*transformer"
    with pytest.raises(UsageError, match=message):
        plan_for(dataset="stdlib")
    with pytest.raises(UsageError, match=r"model='transformer' takes .*\(8, 8, 1\)"):
        plan_for(model="transformer")


def test_vocabulary_must_hold_every_token_id():
    message = "vocabulary_size=100, expected at least the 8192 .*vocabulary_size=8192"
    with pytest.raises(UsageError, match=message):
        plan_for(dataset="stdlib", model="transformer:vocabulary_size=100")
    larger = "transformer:vocabulary_size=9000"
    assert plan_for(dataset="stdlib", model=larger).model.vocabulary_size == 9000


def test_windows_too_long_for_the_sources():
    with pytest.raises(RunError, match="a package has no train window"):
        plan_for(dataset="stdlib", model="transformer", sequence_length=100_000)


def test_parameters_are_as_many_as_the_plan_says():
    made = plan_for(dataset="stdlib", model="transformer:width=8:heads=2")
    params = made.init_params(seed=0)
    assert registry.num_parameters(params) == made.num_parameters
