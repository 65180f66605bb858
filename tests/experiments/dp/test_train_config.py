import dataclasses
import pathlib

import ml_collections
import pytest
from ml_collections.config_flags import config_flags

from experiments.dp import train_config
from experiments.dp.train_config import TrainConfig
from experiments.errors import UsageError

FOLDER = pathlib.Path(train_config.__file__).parent / "configs"
CONFIGS = sorted(
    path for path in FOLDER.glob("*.py") if "train_config.make(" in path.read_text()
)


def parse(overridden=(), **values):
    config = train_config.make(**{"noise_multiplier": 1.0, **values})
    return train_config.parse(config, set(overridden))


def test_defaults_pass_through():
    assert parse(num_steps=7) == TrainConfig(noise_multiplier=1.0, num_steps=7)


def test_an_integer_will_do_for_a_float():
    parsed = parse(l2_clip_norm=2)
    assert parsed.l2_clip_norm == 2.0
    assert type(parsed.l2_clip_norm) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta", 0.0),
        ("delta", 1.0),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", float("inf")),
        ("l2_clip_norm", 0.0),
        ("l2_clip_norm", -1.0),
        ("l2_clip_norm", float("nan")),
        ("learning_rate", 0.0),
        ("momentum", 1.0),
        ("batch_size", 0),
        ("num_steps", 0),
        ("log_interval", 0),
        ("checkpoint_interval", -3),
        ("physical_batch_size", 0),
        ("seed", -1),
        ("method", "ghost"),
    ],
)
def test_value_out_of_range(name, value):
    with pytest.raises(UsageError, match=rf"^config\.{name}={value!r}, expected .*--"):
        parse(**{name: value})


@pytest.mark.parametrize("value", [0.0, -3.0, float("inf"), float("nan")])
def test_epsilon_out_of_range(value):
    with pytest.raises(UsageError, match=r"^config\.epsilon=.*> 0"):
        parse(noise_multiplier=None, epsilon=value)


@pytest.mark.parametrize(
    ("epsilon", "noise_multiplier", "state"),
    [(1.0, 1.0, "both"), (None, None, "neither")],
)
def test_exactly_one_of_epsilon_and_noise(epsilon, noise_multiplier, state):
    with pytest.raises(UsageError, match=f"{state} .* set, expected exactly one"):
        parse(epsilon=epsilon, noise_multiplier=noise_multiplier)


def test_both_on_the_command_line_are_too_many():
    with pytest.raises(UsageError, match="both are set"):
        parse(["epsilon", "noise_multiplier"], epsilon=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize("name", ["epsilon", "noise_multiplier"])
def test_the_command_line_replaces_the_choice_of_the_file(name):
    parsed = parse([name], epsilon=1.0, noise_multiplier=2.0)
    kept = {"epsilon": 1.0, "noise_multiplier": 2.0}[name]
    assert getattr(parsed, name) == kept
    assert [parsed.epsilon, parsed.noise_multiplier].count(None) == 1


def test_unknown_key_gets_near_names():
    config = train_config.make(noise_multiplier=1.0)
    config.num_step = 3
    with pytest.raises(
        UsageError, match="'num_step' is unknown: did you mean num_steps"
    ):
        train_config.parse(config)


def test_missing_keys_are_named():
    config = ml_collections.ConfigDict({"epsilon": 1.0})
    with pytest.raises(UsageError, match=r"lacks dataset, model"):
        train_config.parse(config)


def test_wrong_type_in_a_file():
    values = dataclasses.asdict(TrainConfig(noise_multiplier=1.0)) | {"num_steps": "9"}
    with pytest.raises(UsageError, match=r"num_steps='9' is str, expected int"):
        train_config.parse(ml_collections.ConfigDict(values))


# ml_collections loads config files by a deprecated function.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_valid(path):
    flag_values = config_flags.flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", flag_values=flag_values)
    flag_values(["program", f"--config={path}"])
    parsed = train_config.parse(flag.value)
    assert parsed.seed is None, "a published seed undoes the privacy"
    assert not parsed.out


def test_there_are_configs():
    assert {path.stem for path in CONFIGS} >= {
        "digits_cnn",
        "digits_mlp",
        "fashion_mnist_cnn",
    }
