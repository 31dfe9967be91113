"""One thread per torch operation: the models of the tests are tiny, and threads that wait for each other cost minutes."""

import torch

torch.set_num_threads(1)
