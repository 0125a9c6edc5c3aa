import os

os.environ["OMP_NUM_THREADS"] = "1" if os.environ.get("OMP_NUM_THREADS") != "1" else "2"

import torch

print("threads", torch.get_num_threads())
