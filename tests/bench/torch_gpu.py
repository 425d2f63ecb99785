#!/usr/bin/env python3
"""torch_gpu.py [--compile]: what PyTorch takes for the two pipelines, in microseconds: a line "NAME ROWS EAGER COMPILE".

Medians of CUDA event times, TF32 off, cudnn.benchmark on, inputs rotated beyond the L2 cache. 0: not measured."""
import sys

import torch
import torch.nn.functional as F

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.benchmark = True
torch.set_grad_enabled(False)


def median(f, inputs, seconds=0.4):
    for x in inputs:
        f(x)
    torch.cuda.synchronize()
    times = []
    for i in range(400):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f(inputs[i % len(inputs)])
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3)
        if i >= 10 and sum(times) > seconds * 1e6:
            break
    return sorted(times)[len(times) // 2]


def say(name, rows, f, shape, compiled, dtype=torch.float32):
    n = 4 if rows > 64 else 16
    inputs = [torch.rand(rows, *shape, device="cuda").to(dtype) for _ in range(n)]
    eager, fast = median(f, inputs), 0
    if compiled:
        fast = median(torch.compile(f), inputs)
    print(f"{name} {rows} {eager:.1f} {fast:.1f}", flush=True)


def model_a(dtype):
    k = c = 8192
    w = ((torch.rand(c, k, device="cuda") * 2 - 1) * k ** -0.5).to(dtype)
    b = ((torch.rand(c, device="cuda") * 2 - 1) * k ** -0.5).to(dtype)
    g, h = torch.ones(c, device="cuda", dtype=dtype), torch.zeros(c, device="cuda", dtype=dtype)
    t = torch.randn(1, c, 1, 1, device="cuda").to(dtype)
    return lambda x: F.group_norm(F.linear(x, w, b), 512, g, h).amin(dim=1, keepdim=True) + t


def model_b(minimum, train):
    w = (torch.rand(16, 3, 3, 3, 3, device="cuda") * 2 - 1) * 81 ** -0.5
    b = (torch.rand(16, device="cuda") * 2 - 1) * 81 ** -0.5
    g, h = torch.ones(16, device="cuda"), torch.zeros(16, device="cuda")
    m = torch.tensor(minimum, device="cuda")
    return lambda x: F.dropout(torch.clamp(torch.minimum(F.group_norm(F.conv3d(x, w, b), 8, g, h), m), 0.0, 1.0), 0.2, train)


compiled = "--compile" in sys.argv
print(f"# PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
a = model_a(torch.float32)
for rows in (1, 16, 64, 256, 1024, 4096):
    say("a-fp32", rows, a, (8192,), compiled and rows == 1024)
torch.backends.cuda.matmul.allow_tf32 = True
say("a-tf32", 1024, a, (8192,), False)
torch.backends.cuda.matmul.allow_tf32 = False
say("a-bf16", 1024, model_a(torch.bfloat16), (8192,), False, torch.bfloat16)
for rows in (1, 8, 32, 128):
    say("b-train", rows, model_b(0.0, True), (3, 16, 64, 64), compiled and rows == 128)
for rows in (1, 8, 32, 128):
    say("b-full", rows, model_b(0.5, False), (3, 16, 64, 64), compiled and rows == 128)
