"""Checkpoints: what a run needs to go on, on disk, in a form that any plan can read and any flipped bit betrays.

**Content.** Tensors under their full logical names ("model/blocks.0.attn.qkv.weight",
"optim/blocks.0.attn.qkv.weight/exp_avg"), each cut into boxes as it lay on the ranks that saved it, and one
JSON object, the *state* (step, fingerprint of the data, plan, recipe). No rank, no
plan and no device is part of what a tensor means, so a checkpoint loads under any plan and any number of ranks.

**Folder.**

    runs/<name>/<id>/
      latest                        one line, "checkpoints/step-000200": moved last
      checkpoints/step-000200/
        manifest.json               what is here, where, and its checksums
        rank-00000.safetensors      the boxes that rank 0 wrote; key: "model/head.weight@0,64", the box's offset
        rank-00003.safetensors      a rank with nothing of its own to save has no file

Safetensors and JSON, nothing else: no byte of a checkpoint is ever executed or unpickled.

`manifest.json` is one object. Its first line is `{"blake2b": "<64 hex digits>",`, the BLAKE2b-256 of all bytes
after that line; then

    schema_version   1
    step             the optimiser step after which it was saved
    attempt          which save wrote it
    world            how many ranks saved it
    state            the caller's JSON object
    files            file → {bytes, header_bytes, header_crc32}
    tensors          name → {dtype, shape, blocks: [{file, key, start, shape, crc32, bytes}]}

dtypes are spelt as in safetensors ("F32", "BF16", "I64"). The blocks of a tensor are disjoint and fill it. A tensor
without elements has no blocks; one without dims has one block, with start [] and shape [].

**Trust.** Each block has a CRC-32, each file its length and the CRC-32 of its header, the manifest its own digest: a
flipped bit, a cut or missing file, a file of another save are found when they are read, and named with file and tensor,
beside the newest older checkpoint that is whole. These guard against accidents, not against forgers.

**Visibility.** A save is written under another name and appears by one rename; `latest` moves after that; older
checkpoints go last. Killed at any moment, a save leaves the checkpoint before it in force. Ranks learn of each other
through files in the folder being written, not through collectives, so that a save can run beside training.

**Errors** (exit 2): K01 damaged · K02 could not be written · K03 is of another model · K04 the ranks' pieces do
not tile the tensors.
"""

from unisono.train.state.checkpoint.boxes import Box
from unisono.train.state.checkpoint.find import latest, newest_whole, verify_folder
from unisono.train.state.checkpoint.read import load, read_full, tensor_names
from unisono.train.state.checkpoint.saver import Saver
from unisono.train.state.checkpoint.write import save

__all__ = [
    "Box",
    "Saver",
    "latest",
    "load",
    "newest_whole",
    "read_full",
    "save",
    "tensor_names",
    "verify_folder",
]
