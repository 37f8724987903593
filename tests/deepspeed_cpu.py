"""`dcar.train` under DeepSpeed on CPU processes, run by test_deepspeed.

DeepSpeed itself knows gloo, but Accelerate 1.15 looks for a backend among accelerators alone: it finds none on CPUs,
starts DeepSpeed all the same and takes each process for the only one. Here it is told of gloo; all else is as on GPUs.
"""

from __future__ import annotations

from accelerate.state import PartialState
from accelerate.utils import DistributedType

PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_CPU)

from dcar.train import main  # noqa: E402

if __name__ == "__main__":
    main()
