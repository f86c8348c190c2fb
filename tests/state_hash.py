#!/usr/bin/env python3
"""Second implementation of trainctl's state_hash, from the safetensors files of a checkpoint.

    python3 tests/state_hash.py RUN_DIR/epoch_0_step_999

Prints the hash in hexadecimal. The definition is in shared/store/src/state_hash.rs; this file shares no code with it.
Needs the PyPI module blake3 and nothing else: python3 -m pip install blake3
"""

import json
import struct
import sys
from pathlib import Path

from blake3 import blake3

BLOCK_ELEMENTS = 1024
ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def read_manifest(checkpoint):
    """The manifest, after its last line has been checked: blake3 of all bytes before it."""
    data = (checkpoint / "manifest.json").read_bytes()
    end = data.rindex(b"\n", 0, len(data) - 1) + 1
    body, last = data[:end], data[end:].strip().decode()
    if blake3(body).hexdigest() != last:
        sys.exit(f"{checkpoint}/manifest.json: the last line does not fit the bytes before it")
    return json.loads(body)


def product(numbers):
    result = 1
    for number in numbers:
        result *= number
    return result


def read_shard(path):
    """Yields (name, dtype, piece shape, piece bytes, whole shape, offset)."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    slices = json.loads(header.pop("__metadata__", {}).get("trainctl.slices", "{}"))
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        shape = tensor["shape"]
        whole = slices.get(name, {"shape": shape, "offset": [0] * len(shape)})
        piece = data[8 + length + begin : 8 + length + end]
        yield name, tensor["dtype"], shape, piece, whole["shape"], whole["offset"]


def place(piece, shape, whole, offset, size, out):
    """Copies a piece row by row to where it belongs in the whole tensor."""
    row = (shape[-1] if shape else 1) * size
    if row == 0:
        return
    for index in range(len(piece) // row):
        rest, start, stride = index, offset[-1] if shape else 0, whole[-1] if shape else 1
        for axis in range(len(shape) - 2, -1, -1):
            start += (rest % shape[axis] + offset[axis]) * stride
            rest //= shape[axis]
            stride *= whole[axis]
        out[start * size : start * size + row] = piece[index * row : (index + 1) * row]


def tensor_digest(data, size):
    digests = blake3()
    step = BLOCK_ELEMENTS * size
    for start in range(0, len(data), step):
        digests.update(blake3(data[start : start + step]).digest())
    return digests.digest()


def state_hash(checkpoint):
    tensors, seen = {}, {}
    for file in read_manifest(checkpoint)["files"]:
        section, _, rest = file["path"].partition("/")
        if section not in ("model", "optim") or not (rest.startswith("shard-") and rest.endswith(".safetensors")):
            continue
        for name, dtype, shape, piece, whole, offset in read_shard(checkpoint / file["path"]):
            name, size = f"{section}/{name}", ELEMENT_BYTES[dtype]
            known = tensors.setdefault(name, (dtype, whole, bytearray(product(whole) * size)))
            if known[:2] != (dtype, whole):
                sys.exit(f"{name}: shards disagree on dtype or shape")
            place(piece, shape, whole, offset, size, known[2])
            seen[name] = seen.get(name, 0) + product(shape)
    state = blake3()
    for name in sorted(tensors, key=str.encode):
        dtype, shape, data = tensors[name]
        if seen[name] != product(shape):
            sys.exit(f"{name}: {seen[name]} of {product(shape)} elements are there")
        for text in (name.encode(), dtype.encode()):
            state.update(struct.pack("<I", len(text)) + text)
        state.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        state.update(tensor_digest(bytes(data), ELEMENT_BYTES[dtype]))
    return state.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(state_hash(Path(sys.argv[1])))
