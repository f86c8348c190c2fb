"""The peer of bench/restart.py: a GPT-2 of the same shape under torchrun with --max-restarts, data-parallel over Gloo, which
saves every few steps and resumes. Rank 0 writes a line for each step that is done."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH, SAVE_EVERY = 512, 64, 2, 4, 64, 4, 10


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.ModuleList(block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.norm(x) @ self.tokens.weight.T


def main(folder: Path, seconds_per_step: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(Gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved, step = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with (folder / "steps.jsonl").open("a") as lines:
        while True:
            begun = time.monotonic()
            ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if rank == 0:
                restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
                lines.write(json.dumps({"step": step, "time": time.time(), "restart": restart}) + "\n")
                lines.flush()
                if step % SAVE_EVERY == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, folder / "saving.pt")
                    (folder / "saving.pt").rename(saved)
            (folder / f"pid-{rank}.new").write_text(str(os.getpid()))
            (folder / f"pid-{rank}.new").rename(folder / f"pid-{rank}")  # Whoever reads it must not find it empty.
            time.sleep(max(0.0, seconds_per_step - (time.monotonic() - begun)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
