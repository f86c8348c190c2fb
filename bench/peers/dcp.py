"""torch.distributed.checkpoint as a peer: saves or loads the state of a GPT-2 under AdamW and prints how long it took.

    dcp.py save|load --dir DIR [--ranks 2] [--config bench/state.json] [--threads 1]

Every rank is a process and holds the whole state, as under plain DDP. `save` lets DCP deal the replicated tensors to the
ranks, writes one file for each rank and fsyncs it (FileSystemWriter(sync_files=True)); `load` fills every rank's tensors
from the files. The clock runs between two barriers, so process start, imports and the making of the tensors do not
count. The last line of the output is {"bytes": …, "seconds": …}.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter


def shapes(config: dict) -> dict[str, list[int]]:
    """Names and shapes of a tied GPT2LMHeadModel."""
    d, vocab, positions = config["n_embd"], config["vocab_size"], config["n_positions"]
    found = {"wte.weight": [vocab, d], "wpe.weight": [positions, d], "ln_f.weight": [d], "ln_f.bias": [d]}
    for layer in range(config["n_layer"]):
        for name, shape in {
            "ln_1.weight": [d], "ln_1.bias": [d], "ln_2.weight": [d], "ln_2.bias": [d],
            "attn.c_attn.weight": [d, 3 * d], "attn.c_attn.bias": [3 * d],
            "attn.c_proj.weight": [d, d], "attn.c_proj.bias": [d],
            "mlp.c_fc.weight": [d, 4 * d], "mlp.c_fc.bias": [4 * d],
            "mlp.c_proj.weight": [4 * d, d], "mlp.c_proj.bias": [d],
        }.items():
            found[f"h.{layer}.{name}"] = shape
    return {f"transformer.{name}": shape for name, shape in found.items()}


def state(config: dict, fill: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and both moments in fp32; their pages are touched either way."""
    generator = torch.Generator().manual_seed(1)

    def tensor(shape: list[int]) -> torch.Tensor:
        return torch.full(shape, 1.0) * torch.randn(shape[-1], generator=generator) if fill else torch.full(shape, 0.0)

    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {kind: {name: tensor(shape) for name, shape in shapes(config).items()} for kind in kinds}


def rank_main(rank: int, args: argparse.Namespace, meeting: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.ranks)
    tensors = state(json.loads(args.config.read_text()), fill=args.what == "save")
    dist.barrier()
    start = time.perf_counter()
    if args.what == "save":
        writer = FileSystemWriter(args.dir, single_file_per_rank=True, sync_files=True, thread_count=args.threads)
        dcp.save(tensors, storage_writer=writer)
    else:
        dcp.load(tensors, storage_reader=FileSystemReader(args.dir))
    dist.barrier()
    seconds = time.perf_counter() - start
    if rank == 0:
        size = sum(t.numel() * t.element_size() for part in tensors.values() for t in part.values())
        if args.what == "load" and not all(bool(t.any()) for t in tensors["model"].values()):
            raise SystemExit("the load left a tensor empty")
        print(json.dumps({"bytes": size, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "load"])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="DCP's writing threads for each rank")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "state.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(args, os.path.join(folder, "meeting")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
