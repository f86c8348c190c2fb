"""Makes tests/golden/hf-gpt2: tiny GPT-2s saved by transformers, and the logits and losses that transformers computes.

    target/oracle-venv/bin/python tests/oracle/golden.py [DIR]

| folder | what is particular |
|---|---|
| single  | one model.safetensors, fp32 |
| sharded | the same weights in several files with model.safetensors.index.json |
| hub     | the same weights as the first GPT-2 files were published: names without `transformer.`, no lm_head, and the causal masks (`attn.bias`) among the tensors |
| bf16    | the same weights rounded to bf16 |

expected.safetensors holds `tokens` [2, 17] int64 and, for each folder, `<folder>.logits` [2, 17, 512] and `<folder>.loss`
[] in fp32: what AutoModelForCausalLM.from_pretrained(folder, dtype=float32) gives for `input_ids=tokens, labels=tokens`
(the mean over the 2 × 16 tokens that have a predecessor). Its metadata names the versions that computed them.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model

SEED = 20_240_229
CONFIG = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0)


def model() -> GPT2LMHeadModel:
    """Every bias, gain and weight random and large enough to matter: GPT-2's own initialisation leaves biases 0 and gains 1."""
    made = GPT2LMHeadModel(GPT2Config(**CONFIG)).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            gain = name.endswith("weight") and ".ln_" in name
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + float(gain))
    return made


def add_masks(folder: Path) -> None:
    """The buffers that transformers wrote into GPT-2's files before 2023."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    n = CONFIG["n_positions"]
    for layer in range(CONFIG["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, n, n))
    save_file(tensors, path, metadata={"format": "pt"})


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "golden" / "hf-gpt2")
    torch.use_deterministic_algorithms(True)
    made = model()
    made.save_pretrained(root / "single")
    made.save_pretrained(root / "sharded", max_shard_size="80KB")
    base = GPT2Model(made.config)
    base.load_state_dict(made.transformer.state_dict())
    base.save_pretrained(root / "hub")
    add_masks(root / "hub")
    made.to(torch.bfloat16).save_pretrained(root / "bf16")

    tokens = torch.randint(0, CONFIG["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(SEED + 1))
    expected = {"tokens": tokens}
    for folder in ["single", "sharded", "hub", "bf16"]:
        loaded = AutoModelForCausalLM.from_pretrained(root / folder, dtype=torch.float32).eval()
        with torch.no_grad():
            output = loaded(input_ids=tokens, labels=tokens)
        expected |= {f"{folder}.logits": output.logits.contiguous(), f"{folder}.loss": output.loss}
    for folder in ["sharded", "hub"]:
        # The same weights: one copy of the numbers is enough.
        assert torch.equal(expected.pop(f"{folder}.logits"), expected["single.logits"]), folder
        assert torch.equal(expected.pop(f"{folder}.loss"), expected["single.loss"]), folder
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "seed": str(SEED)}
    save_file(expected, root / "expected.safetensors", metadata=versions)


if __name__ == "__main__":
    main()
