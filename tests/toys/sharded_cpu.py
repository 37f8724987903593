"""`dcar.train.car` sharded over CPU processes, run by test_sharded.

torch's FSDP and DeepSpeed support gloo, but Accelerate 1.15 looks for another backend and shards
only on accelerators. Here it treats CPU processes as those of several GPUs; everything else,
including how the Trainer saves and resumes, is as on GPUs.
"""

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def set_device(state: PartialState) -> None:
    state.device = torch.device("cpu")


PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = set_device

from dcar.train.car import CARTrainer, main  # noqa: E402  (after the patch)

look = CARTrainer.look


def divided(self: CARTrainer) -> None:
    """Check before every update that FSDP holds only a part of the weights in this process."""
    if self.is_fsdp_enabled:
        mine = sum(p.to_local().numel() for p in self.model.parameters())
        assert mine < 0.6 * sum(p.numel() for p in self.model.parameters())
    look(self)


CARTrainer.look = divided

if __name__ == "__main__":
    main()
