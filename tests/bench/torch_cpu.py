"""PyTorch's CPU as a yardstick: reads "case rows" lines, runs each twice, answers with the second's time."""
import sys
import time

import torch
from torch import nn

torch.set_num_threads(int(sys.argv[1]))
torch.set_grad_enabled(False)
torch.manual_seed(1)


def make_a():
    linear, norm = nn.Linear(8192, 8192), nn.GroupNorm(512, 8192)
    bias = torch.randn(1, 8192, 1, 1)
    return lambda x: torch.min(norm(linear(x)), dim=1, keepdim=True)[0] + bias


def make_b(floor, training):
    conv, norm, dropout = nn.Conv3d(3, 16, 3), nn.GroupNorm(8, 16), nn.Dropout(0.2)
    dropout.train(training)
    least = torch.tensor(floor)
    return lambda x: dropout(torch.clamp(torch.minimum(norm(conv(x)), least), 0.0, 1.0))


MODELS = {
    "A": (make_a, (8192,)),
    "B full": (lambda: make_b(0.5, False), (3, 16, 64, 64)),
    "B": (lambda: make_b(0.0, False), (3, 16, 64, 64)),
    "B train": (lambda: make_b(0.0, True), (3, 16, 64, 64)),
}
made = {}
print(f"PyTorch {torch.__version__}", flush=True)
for line in sys.stdin:
    case, rows = line.rsplit(maxsplit=1)
    make, shape = MODELS[case]
    if (case, rows) not in made:
        made = {(case, rows): (make(), torch.rand(int(rows), *shape))}
    model, x = made[case, rows]
    model(x)
    start = time.perf_counter()
    model(x)
    print(time.perf_counter() - start, flush=True)
