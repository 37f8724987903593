"""`dcar.train.car` sharded over CPU processes, run by test_sharded.

torch's FSDP and DeepSpeed know gloo, but Accelerate 1.15 looks for a backend and shards on accelerators alone. Here it
takes CPU processes for those of several GPUs; all else, the Trainer's saving and resuming among it, is as on GPUs.
"""

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def set_device(state: PartialState) -> None:
    state.device = torch.device("cpu")


PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = set_device

from dcar.train.car import main  # noqa: E402  (behind the patch)

if __name__ == "__main__":
    main()
