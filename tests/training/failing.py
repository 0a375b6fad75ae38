"""training/train.py with faults: for each of torchrun's attempts, FAULTS names what befalls which rank, and when."""

import os

from tests.training.launch import Fault, faults_of
from training.train import main

if __name__ == "__main__":
    named = [fault.split(":") for fault in os.environ["FAULTS"].split()]
    faults = [Fault(kind, int(rank), int(step)) for kind, rank, step in named]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with faults_of(int(os.environ["RANK"]), faults[attempt : attempt + 1]):
        main()
