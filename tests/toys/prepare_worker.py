"""Preparation in a process of its own: `python prepare_worker.py key=value …`. Prints one line
of JSON: utterances tokenised, peak memory in MB."""

import json
import resource
import sys

from tiny_data import ToyEncoder, ToyTokenizer

from dcar.config import load_config
from dcar.prepare.run import PrepareConfig, run

if __name__ == "__main__":
    tokenizer = ToyTokenizer()
    run(load_config(PrepareConfig, sys.argv[1:]), tokenizer=tokenizer, speaker_encoder=ToyEncoder())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"utterances": sum(map(len, tokenizer.batches)), "peak_mb": peak}))
