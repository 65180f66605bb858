"""Greedy decoding by Hugging Face transformers, for benchmark_sweep to compare with.

It is started by benchmark_sweep with an interpreter that has torch and transformers,
which this project needs for nothing else:

    python transformers_generate.py MODEL_FOLDER PROMPTS.npy NUM_TOKENS

What a first call of `generate` on all prompts gives is written to
PROMPTS.npy.generated.npy, and a line with versions printed. From then on each line of
input is answered by one more call, and one line.
"""

import sys

import numpy as np


def main() -> None:
    """Serves until the input ends."""
    import torch
    import transformers

    folder, prompts_path, num_tokens = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    # As in a sweep, the token between documents ends nothing.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts_BxT = torch.from_numpy(np.load(prompts_path).astype(np.int64))

    def generate() -> np.ndarray:
        with torch.inference_mode():
            tokens_BxL = model.generate(
                prompts_BxT,
                attention_mask=torch.ones_like(prompts_BxT),
                do_sample=False,
                min_new_tokens=int(num_tokens),
                max_new_tokens=int(num_tokens),
            )
        return tokens_BxL[:, prompts_BxT.shape[1] :].numpy()

    np.save(f"{prompts_path}.generated.npy", generate())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(versions, flush=True)
    for _ in sys.stdin:
        generate()
        print("done", flush=True)


if __name__ == "__main__":
    main()
