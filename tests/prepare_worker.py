"""One process of a streamed preparation, launched by tests: `python prepare_worker.py key=value …`, rank in RANK.

Prints one line of JSON: chunks tokenised, peak memory in MB.
"""

import json
import resource
import sys

from tiny_data import ToyEncoder, ToyTokenizer

from dcar.config import load_config
from dcar.prepare.run import PrepareConfig, run

if __name__ == "__main__":
    tokenizer = ToyTokenizer()
    report = run(load_config(PrepareConfig, sys.argv[1:]), tokenizer=tokenizer, speaker_encoder=ToyEncoder())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"utterances": sum(map(len, tokenizer.batches)), "peak_mb": peak, "text": report.text()}))
