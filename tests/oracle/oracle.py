"""Compares trainctl with transformers in both directions: `make oracle`.

- **Out**: a short run with two trainers; `trainctl export` in several forms, and the run's own `model/consolidated`. Each loads
  in AutoModelForCausalLM with no key missing or left over and gives the logits of the checkpoint; AutoTokenizer encodes
  and decodes as the tokenizer that made the data; the loss is that of the run's last validation row.
  PyTorch's reader of sharded safetensors reads the checkpoint's `model/` without us.
- **In**: models saved by transformers in several forms. Each gives the same logits here, and as `model.init` the same loss
  in the first step of a run with two trainers.

Our logits come from `worker/engine/examples/logits.rs`, our losses from the runs' rows. Logits agree within 1e-5 of their
range, losses within 1e-5. All documents of the data are the same and as long as a sample, so every sample holds the same
tokens, whichever a step reads.
"""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import golden

ROOT = Path(__file__).resolve().parents[2]
TRAINCTL = ROOT / "target" / "release" / "trainctl"
LOGITS = ROOT / "target" / "release" / "examples" / "logits"
WORK = ROOT / "target" / "oracle"
TOLERANCE = 1e-5
DOCUMENT = "The pointer names a checkpoint that is whole, or it is not moved; nobody waits for a write that can fail."


@dataclass(frozen=True)
class Data:
    """A corpus whose samples are all the same."""

    prefix: Path
    tokenizer: Path
    sample: torch.Tensor
    """[1, T + 1]: a sample with the token after it."""

    @property
    def seq_length(self) -> int:
        return self.sample.shape[1] - 1


def sh(*command: object) -> str:
    """Runs a program; its output is shown when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\nexit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_data() -> Data:
    words = [bytes(random.Random(seed).choices(range(97, 123), k=3 + seed % 7)).decode() for seed in range(300)]
    dice = random.Random(5)
    lines = [" ".join(dice.choices(words, k=60)) for _ in range(400)] + [DOCUMENT] * 50
    text, same = WORK / "text.jsonl", WORK / "same.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    same.write_text((json.dumps({"text": DOCUMENT}) + "\n") * 400)
    tokenizer = WORK / "tokenizer"
    sh(TRAINCTL, "data", "tokenizer", "train", text, "--output-path", tokenizer, "--vocab-size", 512)
    sh(TRAINCTL, "data", "preprocess", same, "--tokenizer", tokenizer, "--output-prefix", WORK / "same", "--append-eod")
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    document = [*encoder(DOCUMENT)["input_ids"], encoder.eos_token_id]
    return Data(WORK / "same_text_document", tokenizer, torch.tensor([[*document, document[0]]]))


def run(data: Data, name: str, model: dict, steps: int) -> Path:
    """Trains with two workers and returns the run's directory."""
    directory = WORK / name
    section = {
        "paths": str(data.prefix), "tokenizer": str(data.tokenizer), "index_mapping_dir": str(WORK / "index"),
        "seq_length": data.seq_length, "split": "80,20,0",
    }
    spec = {
        "name": name, "run_dir": str(directory), "seed": 7, "model": model, "dataset": section,
        "resources": {"workers": 2, "device": "cpu"},
        "validation_dataset": {"num_val_samples": 4},
        "step_scheduler": {
            "global_batch_size": 4, "local_batch_size": 2, "max_steps": steps, "ckpt_every_steps": steps, "val_every_steps": steps,
        },
        "optimizer": {"lr": 3e-3},
    }
    path = WORK / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    sh(TRAINCTL, "run", path)
    return directory


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Checks:
    """What was compared and how it went."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, 0

    def that(self, name: str, holds: bool, found: str) -> None:
        self.passed += holds
        self.failed += not holds
        print(f"{'ok    ' if holds else 'FAILED'}  {name}: {found}", flush=True)

    def logits(self, name: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
        if ours.shape != theirs.shape:
            return self.that(name, False, f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}")
        part = ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item()
        self.that(f"{name}: logits", part <= tolerance, f"differ by {part:.1e} of their range")

    def loss(self, name: str, ours: float, theirs: float) -> None:
        part = abs(ours - theirs) / theirs
        self.that(f"{name}: loss", part <= TOLERANCE, f"{ours:.7f} here, {theirs:.7f} there, {part:.1e} relative")


def our_logits(source: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What this project computes for a Hugging Face directory or a checkpoint's directory."""
    ids, out = WORK / "tokens.json", WORK / "logits.safetensors"
    ids.write_text(json.dumps(tokens.tolist()))
    sh(LOGITS, "--from", source, "--tokens", ids, "--out", out)
    return load_file(out)["logits"]


class Theirs:
    """A directory as transformers loads it, in fp32."""

    def __init__(self, directory: Path) -> None:
        loaded, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        self.model = loaded.eval()
        self.odd_keys = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(input_ids=tokens).logits

    def loss(self, data: Data) -> float:
        """Of one sample: its T tokens, each with the next one as its label."""
        logits = self.logits(data.sample[:, :-1])[0]
        return torch.nn.functional.cross_entropy(logits.double(), data.sample[0, 1:]).item()


def check_tokenizer(checks: Checks, name: str, directory: Path, theirs: Theirs, data: Data) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(DOCUMENT)["input_ids"]
    checks.that(f"{name}: tokens", ids == data.sample[0, :-2].tolist(), f"{len(ids)} ids as in the data")
    checks.that(f"{name}: text", tokenizer.decode(ids) == DOCUMENT, "decodes to the document")
    end = (tokenizer.eos_token_id, theirs.model.config.eos_token_id, theirs.model.generation_config.eos_token_id)
    checks.that(f"{name}: end of text", set(end) == {data.sample[0, -2].item()}, f"tokenizer, config, generation: {end}")
    prompt = torch.tensor([ids[:8]])
    text = theirs.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    checks.that(f"{name}: generate", text.shape[1] > prompt.shape[1], repr(tokenizer.decode(text[0])))


def logits_by_dcp(checkpoint: Path, exported: Path, tokens: torch.Tensor) -> torch.Tensor:
    """PyTorch's own reader of sharded safetensors, and so NeMo AutoModel's, on the checkpoint as it is."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(exported), dtype=torch.float32).eval()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(checkpoint / "model")), no_dist=True)
    with torch.no_grad():
        return model(input_ids=tokens).logits


def out(checks: Checks, data: Data) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 512, "n_positions": 64}
    directory = run(data, "out", {"config": config}, 12)
    checkpoint = (directory / "LATEST").resolve()
    tokens = torch.randint(0, 512, (3, 64), generator=torch.Generator().manual_seed(3))
    ours = our_logits(checkpoint, tokens)
    last_loss = rows(directory / "validation.jsonl")[-1]["val_loss"]
    exports = {"export": [], "export in shards": ["--max-shard-size", "100KB"], "export in bf16": ["--dtype", "bf16"]}
    directories = {"consolidated": checkpoint / "model" / "consolidated"}
    for name, options in exports.items():
        directories[name] = WORK / name.replace(" ", "-")
        sh(TRAINCTL, "export", "--from", directory, "--to", directories[name], *options)
    for name, exported in directories.items():
        if not (exported / "config.json").exists():
            checks.that(name, False, f"no {exported}/config.json")
            continue
        theirs = Theirs(exported)
        checks.that(f"{name}: keys", not theirs.odd_keys, str(theirs.odd_keys or "none missing, none left over"))
        # bf16 keeps 8 bits of each weight.
        exact = "bf16" not in name
        checks.logits(name, ours, theirs.logits(tokens), TOLERANCE if exact else 0.03)
        if exact:
            checks.loss(name, last_loss, theirs.loss(data))
        check_tokenizer(checks, name, exported, theirs, data)
    shards = list(directories["export in shards"].glob("*.safetensors"))
    checks.that("export in shards: files", len(shards) > 2, f"{len(shards)} files")
    checks.logits("model/ by DCP's reader", ours, logits_by_dcp(checkpoint, directories["export"], tokens))


def back(checks: Checks, data: Data) -> None:
    for name, directory in golden.save_variants(WORK / "saved").items():
        theirs = Theirs(directory)
        tokens = torch.randint(0, 512, (2, 48), generator=torch.Generator().manual_seed(4))
        checks.logits(name, our_logits(directory, tokens), theirs.logits(tokens))
        # What is trained is the language model, also from a base model's weights.
        changes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "architectures": ["GPT2LMHeadModel"]}
        config = json.loads((directory / "config.json").read_text()) | changes
        trained = run(data, f"in-{name}", {"config": config, "init": str(directory)}, 1)
        checks.loss(f"{name} as model.init", rows(trained / "training.jsonl")[0]["loss"], theirs.loss(data))


def main() -> int:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    checks = Checks()
    data = make_data()
    out(checks, data)
    back(checks, data)
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
