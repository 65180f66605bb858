"""Makes the reference checkpoints beside this file, or checks folders saved from them.

Runs in an environment of its own, with torch and transformers (5.24.0 was used), which
the project itself never imports:

    python tests/experiments/models/golden/make_golden.py [NAME ...]
    python tests/experiments/models/golden/make_golden.py --check=DIR

The first writes, for each of the tiny random models below, what `save_pretrained`
writes (config.json, model.safetensors or shards) and expected.npz: `tokens` i64[B, T],
`positions` i64[P] and `logits` f32[B, P, V] at those positions. Weights are far larger
than at initialisation, so that a wrong mask, rotation or scale changes logits by much
more than rounding does. The vocabulary has 128 rows of which only 96 are ever used,
like the padded ones of published checkpoints.

An encoder-decoder has `inputs` i64[B, S] besides, and its `tokens` are the targets,
which the reference shifts right; `masked_logits` are those with `mask` i64[B, S] over
the inputs. `encoder_buckets` and `decoder_buckets` are those of `distances` (key minus
query).

The second opens DIR/NAME for each of them, as `experiments.models.save` wrote it after
`load`, and fails unless transformers finds every tensor, no other, and equal logits.
"""

import argparse
import pathlib

import numpy as np
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

HERE = pathlib.Path(__file__).parent
VOCABULARY_SIZE, USED, LENGTH = 128, 96, 300
# Both past the distances, 128 and 50, from which on all share a bucket of positions.
NUM_INPUTS, NUM_TARGETS = 200, 180
IDS = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": 0, "eos_token_id": 1}
OPENAI_SIZES = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
NEOX_SIZES = {
    "max_position_embeddings": LENGTH,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
T5_SIZES = {
    "vocab_size": VOCABULARY_SIZE,
    "d_model": 32,
    "d_kv": 6,
    "num_heads": 4,
    "d_ff": 40,
    "num_layers": 2,
    "decoder_start_token_id": 0,
}

CONFIGS = {
    "gpt2": transformers.GPT2Config(**IDS, **OPENAI_SIZES, layer_norm_epsilon=1e-3),
    "gpt2_by_layer": transformers.GPT2Config(
        **IDS,
        **OPENAI_SIZES,
        n_inner=40,
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
    "gpt_neo": transformers.GPTNeoConfig(
        **IDS,
        max_position_embeddings=LENGTH,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        intermediate_size=48,
        attention_types=[[["global", "local"], 2]],
    ),
    "gpt_j": transformers.GPTJConfig(**IDS, **OPENAI_SIZES, rotary_dim=6),
    "gpt_neox": transformers.GPTNeoXConfig(**IDS, **NEOX_SIZES),
    "gpt_neox_sequential": transformers.GPTNeoXConfig(
        **IDS,
        **NEOX_SIZES,
        use_parallel_residual=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
        tie_word_embeddings=True,
    ),
    "gpt_neox_sharded": transformers.GPTNeoXConfig(
        **IDS, **NEOX_SIZES, attention_bias=False
    ),
    "t5_v1_1": transformers.T5Config(
        **T5_SIZES,
        num_decoder_layers=3,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "t5_first": transformers.T5Config(
        **T5_SIZES,
        feed_forward_proj="relu",
        relative_attention_num_buckets=20,
        relative_attention_max_distance=50,
        layer_norm_epsilon=1e-3,
    ),
}
SHARD_SIZE = {"gpt_neox_sharded": "20KB"}


def with_large_weights(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with outputs of each layer as large as its inputs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                is_norm = "ln_" in name or "norm" in name
                offset = 1 if is_norm and name.endswith("weight") else 0
                parameter.copy_(offset + 0.2 * random)
            elif "relative_attention_bias" in name:
                parameter.copy_(random)
            elif name.endswith("Attention.q.weight"):
                # T5 does not scale its scores.
                parameter.copy_(0.5 * random / parameter.shape[0] ** 0.5)
            elif any(part in name for part in ("wte", "wpe", "embed_in", "shared")):
                parameter.copy_(0.4 * random)
            else:
                parameter.copy_(1.5 * random / parameter.shape[0] ** 0.5)
    return model.eval()


def tokens_and_positions() -> tuple[np.ndarray, np.ndarray]:
    """Two different sequences, and some of their positions, the last ones densely."""
    tokens_BxT = np.random.default_rng(0).integers(0, USED, (2, LENGTH))
    positions_P = np.concatenate([np.arange(0, 250, 10), np.arange(250, LENGTH)])
    return tokens_BxT, positions_P


def logits_at(model, tokens_BxT: np.ndarray, positions_P: np.ndarray) -> np.ndarray:
    """f32[B, P, V]."""
    with torch.no_grad():
        return model(torch.tensor(tokens_BxT)).logits[:, positions_P].numpy()


def t5_arrays() -> dict[str, np.ndarray]:
    """Inputs with a mask, targets and some of their positions."""
    rng = np.random.default_rng(1)
    mask_BxS = np.ones((2, NUM_INPUTS), np.int64)
    mask_BxS[0, -60:] = 0
    mask_BxS[1, 20:30] = 0
    return {
        "inputs": rng.integers(0, USED, (2, NUM_INPUTS)),
        "mask": mask_BxS,
        "tokens": rng.integers(0, USED, (2, NUM_TARGETS)),
        "positions": np.concatenate(
            [np.arange(0, 150, 10), np.arange(150, NUM_TARGETS)]
        ),
    }


def t5_logits(model, given: dict[str, np.ndarray], masked: bool) -> np.ndarray:
    """f32[B, P, V]."""
    targets_BxT = torch.tensor(given["tokens"])
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(given["inputs"]),
            attention_mask=torch.tensor(given["mask"]) if masked else None,
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(targets_BxT),
        )
    return output.logits[:, given["positions"]].numpy()


def make_t5(name: str) -> None:
    """Writes one golden folder of an encoder-decoder."""
    folder, config = HERE / name, CONFIGS[name]
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        config, attn_implementation="eager"
    )
    if name == "t5_v1_1":
        # The reference ties whatever it makes anew, but no head that it has read.
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCABULARY_SIZE, 32))
    with_large_weights(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    given = t5_arrays()
    distances = torch.arange(-300, 301)
    buckets = {
        f"{stack}_buckets": T5Attention._relative_position_bucket(
            distances,
            stack == "encoder",
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
        ).numpy()
        for stack in ("encoder", "decoder")
    }
    np.savez(
        folder / "expected.npz",
        **given,
        **buckets,
        distances=distances.numpy(),
        logits=t5_logits(model, given, masked=False),
        masked_logits=t5_logits(model, given, masked=True),
    )


def make(name: str) -> None:
    """Writes one golden folder."""
    if name.startswith("t5"):
        make_t5(name)
        return
    folder = HERE / name
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name], attn_implementation="eager"
    )
    with_large_weights(model)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE.get(name, "1GB"))
    (folder / "generation_config.json").unlink()
    tokens_BxT, positions_P = tokens_and_positions()
    np.savez(
        folder / "expected.npz",
        tokens=tokens_BxT,
        positions=positions_P,
        logits=logits_at(model, tokens_BxT, positions_P),
    )


def check(folder: pathlib.Path) -> float:
    """Largest difference of the logits of a saved folder from the golden ones."""
    is_t5 = folder.name.startswith("t5")
    auto = transformers.AutoModelForCausalLM
    if is_t5:
        auto = transformers.AutoModelForSeq2SeqLM
    model, info = auto.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        raise SystemExit(f"{folder}: {wrong}")
    expected = np.load(HERE / folder.name / "expected.npz")
    if is_t5:
        found = t5_logits(model.eval(), expected, masked=False)
    else:
        found = logits_at(model.eval(), expected["tokens"], expected["positions"])
    return float(np.abs(found - expected["logits"]).max())


def main() -> None:
    """Makes the folders, or checks those of --check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *CONFIGS], metavar="NAME")
    parser.add_argument("--check", type=pathlib.Path, metavar="DIR")
    given = parser.parse_args()
    torch.manual_seed(0)
    for name in given.names or CONFIGS:
        if given.check is None:
            make(name)
            print(f"{name}: {sum(f.stat().st_size for f in (HERE / name).iterdir())} B")
            continue
        error = check(given.check / name)
        print(f"{name}: logits differ by at most {error:.1e}")
        if not error < 1e-5:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
