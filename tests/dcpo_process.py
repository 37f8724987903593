"""One process of a distributed DCPO run in the toy world: the entry point of `rl.train`, given toy parts.

    accelerate launch --multi_gpu --num_processes 2 tests/dcpo_process.py key=value …
"""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from toy_world import ToyDecoder, ToyRecognizer, ToyVocoder, toy_items  # noqa: E402

from rl.train import main  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:], decoder=ToyDecoder(), vocoder=ToyVocoder(), recognizer=ToyRecognizer(),
         train_dataset=toy_items(24), eval_dataset=toy_items(9, 5, "dev"))
