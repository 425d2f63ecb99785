"""PyTorch in process as a yardstick for the serving table: serve_torch.py THREADS SECONDS DEVICE MODEL ROWS..., a JSON line
for each number of rows: the same work as one request after the other, without a server. DEVICE: cpu, or cuda, where rows and
results lie in pinned host memory as a client's do. MODEL: small (128 -> 256) or A."""
import json
import sys
import time

import torch
from torch import nn

threads, seconds, device, name = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(threads)
torch.set_grad_enabled(False)
torch.manual_seed(1)
inputs, outputs, groups = {"small": (128, 256, 16), "A": (8192, 8192, 512)}[name]
linear, norm = nn.Linear(inputs, outputs).to(device), nn.GroupNorm(groups, outputs).to(device)
bias = torch.randn(1, outputs, 1, 1).to(device)


def run(x):
    return torch.min(norm(linear(x)), dim=1, keepdim=True)[0] + bias


def serve(x, y):
    if device == "cpu":
        return run(x)
    y.copy_(run(x.to(device, non_blocking=True)), non_blocking=True)
    torch.cuda.synchronize()
    return y


for rows in map(int, sys.argv[5:]):
    x, y = torch.rand(rows, inputs), torch.empty(1, outputs, rows, 1)
    if device != "cpu":
        x, y = x.pin_memory(), y.pin_memory()
    for _ in range(3):
        serve(x, y)
    times = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or not times:
        serve(x, y)
        times.append(time.perf_counter() - start)
    times.sort()
    print(json.dumps({
        "yardstick": f"PyTorch {torch.__version__}", "device": device, "model": name, "rows": rows,
        "requests_per_s": len(times) / sum(times), "rows_per_s": rows * len(times) / sum(times),
        "latency_us": {"p50": times[len(times) // 2] * 1e6, "p99": times[len(times) * 99 // 100] * 1e6},
    }), flush=True)
