"""Makes tests/golden/hf-gpt2: tiny GPT-2s saved by transformers, and the logits and losses that transformers computes.

    $(scripts/oracle-venv.sh) tests/oracle/golden.py [DIR]

| folder | what is particular |
|---|---|
| single | one model.safetensors, fp32 |
| sharded | the same weights in several files with model.safetensors.index.json |
| hub | the same weights as the first GPT-2 files had them: names without `transformer.`, causal masks (`attn.bias`) among them |
| bf16 | the same weights rounded to bf16 |

expected.safetensors holds `tokens` [2, 17] int64 and, for `single` and `bf16`, `<folder>.logits` [2, 17, 512] and
`<folder>.loss` [] in fp32: what AutoModelForCausalLM.from_pretrained(folder, dtype=float32) gives for `input_ids=tokens,
labels=tokens` (the loss is the mean over the 2 × 16 tokens that have a predecessor). `sharded` and `hub` give the same as
`single`, bit for bit. Its metadata names the versions that computed them.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model

SEED = 20_240_229
CONFIG = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0)
COMMITTED = ["single", "sharded", "hub", "bf16"]


def model(**config) -> GPT2LMHeadModel:
    """Every bias, gain and weight random and large enough to matter: GPT-2's own initialisation leaves biases 0 and gains 1."""
    made = GPT2LMHeadModel(GPT2Config(**CONFIG, **config)).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            gain = name.endswith("weight") and ".ln_" in name
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + float(gain))
    return made


def save_as_on_the_hub(made: GPT2LMHeadModel, folder: Path) -> None:
    """The base model's names, and the buffers that transformers wrote into GPT-2's files before 2023."""
    base = GPT2Model(made.config)
    base.load_state_dict(made.transformer.state_dict())
    base.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    n = CONFIG["n_positions"]
    for layer in range(CONFIG["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, n, n))
    save_file(tensors, path, metadata={"format": "pt"})


def save_variants(root: Path) -> dict[str, Path]:
    """Everything that is committed, and two more: a head of its own, and fp16."""
    folders = {name: root / name for name in ["single", "sharded", "hub", "bf16", "fp16", "untied"]}
    made = model()
    made.save_pretrained(folders["single"])
    made.save_pretrained(folders["sharded"], max_shard_size="80KB")
    save_as_on_the_hub(made, folders["hub"])
    model().to(torch.bfloat16).save_pretrained(folders["bf16"])
    model().to(torch.float16).save_pretrained(folders["fp16"])
    model(tie_word_embeddings=False).save_pretrained(folders["untied"])
    return folders


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "golden" / "hf-gpt2")
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as work:
        for name, folder in save_variants(Path(work)).items():
            if name in COMMITTED:
                shutil.copytree(folder, root / name, dirs_exist_ok=True)

    tokens = torch.randint(0, CONFIG["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(SEED + 1))
    expected = {"tokens": tokens}
    for folder in COMMITTED:
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
    for path in root.rglob("*.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    main()
