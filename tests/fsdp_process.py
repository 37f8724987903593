"""One of two processes that train a decoder with sharded parameters (FSDP 2, gloo), for tests/dcar/train/test_fsdp.py.

    torchrun --standalone --nproc_per_node 2 tests/fsdp_process.py car|backbone OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_backbones import row, tiny_backbone
from tiny_decoders import tiny_decoder
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcar.errors import ConfigError
from dcar.optim import ScaledAdam


def main(kind: str, out: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = (tiny_decoder(dropout=0.0) if kind == "car" else tiny_backbone()).train()
    model.gradient_checkpointing_enable()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole = sum(p.numel() for p in model.parameters())
    mine = sum(p.to_local().numel() for p in model.parameters())
    assert mine < 0.6 * whole, (mine, whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = model(**row(dist.get_rank())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in gathered.items()}, out / "model.safetensors")
        model.save_config(out)
    model(**row(dist.get_rank())).loss.backward()
    try:
        ScaledAdam(model.parameters()).step()
        raise AssertionError("ScaledAdam took sharded parameters")
    except ConfigError as error:
        print(f"refused: {error}\n", end="", flush=True)  # one write: two processes share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
