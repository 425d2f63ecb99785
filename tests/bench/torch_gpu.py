#!/usr/bin/env python3
"""torch_gpu.py [--compile] [--only=PREFIX]: what PyTorch takes for the models of bench_gpu, in microseconds: a line
"NAME ROWS EAGER COMPILE".

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
    if not name.startswith(only):
        return
    n = 4 if rows > 64 else 16
    inputs = [torch.rand(rows, *shape, device="cuda").to(dtype) for _ in range(n)]
    eager, fast = median(f, inputs), 0
    if compiled:
        torch._dynamo.reset()
        fast = median(torch.compile(f), inputs)
    print(f"{name} {rows} {eager:.1f} {fast:.1f}", flush=True)


def model_a(dtype):
    k = c = 8192
    w = ((torch.rand(c, k, device="cuda") * 2 - 1) * k ** -0.5).to(dtype)
    b = ((torch.rand(c, device="cuda") * 2 - 1) * k ** -0.5).to(dtype)
    g, h = torch.ones(c, device="cuda", dtype=dtype), torch.zeros(c, device="cuda", dtype=dtype)
    t = torch.randn(1, c, 1, 1, device="cuda").to(dtype)
    return lambda x: F.group_norm(F.linear(x, w, b), 512, g, h).amin(dim=1, keepdim=True) + t


def model_c(minimum, train, channels, outs, kernel, stride, padding, groups, dtype=torch.float32):
    fan = (channels * kernel[0] * kernel[1] * kernel[2]) ** -0.5
    w = ((torch.rand(outs, channels, *kernel, device="cuda") * 2 - 1) * fan).to(dtype)
    b = ((torch.rand(outs, device="cuda") * 2 - 1) * fan).to(dtype)
    g, h = torch.ones(outs, device="cuda", dtype=dtype), torch.zeros(outs, device="cuda", dtype=dtype)
    m = torch.tensor(minimum, device="cuda", dtype=dtype)
    return lambda x: F.dropout(torch.clamp(torch.minimum(F.group_norm(F.conv3d(x, w, b, stride, padding), groups, g, h), m), 0.0, 1.0), 0.2, train)


def model_b(minimum, train, dtype=torch.float32):
    return model_c(minimum, train, 3, 16, (3, 3, 3), 1, 0, 8, dtype)


def parameters(*shape, dtype=torch.float32):
    fan = torch.Size(shape[1:]).numel() ** -0.5
    return [((torch.rand(n, device="cuda") * 2 - 1) * fan).to(dtype) for n in (shape, shape[:1])]


def linear(c, k, dtype=torch.float32):
    w, b = parameters(c, k, dtype=dtype)
    return lambda x: F.linear(x, w, b)


def conv3d(outs, channels, kernel, stride, padding):
    w, b = parameters(outs, channels, *kernel)
    return lambda x: F.conv3d(x, w, b, stride, padding)


def group_norm(groups, channels):
    g, h = torch.ones(channels, device="cuda"), torch.zeros(channels, device="cuda")
    return lambda x: F.group_norm(x, groups, g, h)


def add(*shape):
    t = torch.randn(*shape, device="cuda")
    return lambda x: x + t


compiled = "--compile" in sys.argv
only = next((a[7:] for a in sys.argv if a.startswith("--only=")), "")
print(f"# PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
if "a".startswith(only[:1]):
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
    say("b-eval", rows, model_b(0.0, False), (3, 16, 64, 64), compiled and rows == 128)
for rows in (1, 8, 32, 128):
    say("b-full", rows, model_b(0.5, False), (3, 16, 64, 64), compiled and rows == 128)
conv, norm = conv3d(16, 3, (3, 3, 3), 1, 0), group_norm(8, 16)
half = torch.tensor(0.5, device="cuda")
say("b-full-train", 128, model_b(0.5, True), (3, 16, 64, 64), compiled)
for name, shape in (("b-full-add", (16, 1, 1, 1)), ("b-full-add-all", (16, 14, 62, 62))):
    t = torch.randn(*shape, device="cuda")
    say(name, 128, lambda x: F.dropout(torch.clamp(torch.minimum(norm(conv(x)) + t, half), 0.0, 1.0), 0.2, False),
        (3, 16, 64, 64), compiled)
for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
    say(f"b-eval-{name}", 128, model_b(0.0, False, dtype), (3, 16, 64, 64), False, dtype)
    say(f"b-train-{name}", 128, model_b(0.0, True, dtype), (3, 16, 64, 64), False, dtype)
    say(f"b-full-{name}", 128, model_b(0.5, False, dtype), (3, 16, 64, 64), False, dtype)
# The same list as in bench_gpu.c.
for name, dtype, channels, extent, outs, kernel, stride, padding, groups, rows, train in (
        ("c1", torch.float32, 3, (16, 56, 56), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1), 8, 32, False),
        ("c2", torch.float32, 1, (24, 33, 47), 8, (5, 5, 5), (1, 1, 1), (2, 2, 2), 4, 64, False),
        ("c3", torch.float32, 16, (12, 28, 28), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1), 16, 64, True),
        ("c4", torch.float32, 32, (17, 41, 41), 64, (3, 3, 3), (2, 2, 2), (1, 1, 1), 32, 24, False),
        ("c5", torch.float32, 64, (9, 32, 30), 20, (1, 1, 1), (1, 1, 1), (0, 0, 0), 1, 48, False),
        ("c6", torch.bfloat16, 24, (10, 31, 29), 48, (3, 3, 3), (1, 1, 1), (1, 1, 1), 6, 40, False),
        ("c7", torch.float16, 64, (8, 28, 28), 96, (3, 3, 3), (1, 1, 1), (1, 1, 1), 12, 16, False),
        ("c8", torch.float32, 7, (13, 27, 35), 10, (3, 5, 1), (2, 1, 1), (1, 2, 0), 10, 96, True)):
    for n in (1, rows):
        say(name, n, model_c(0.5, train, channels, outs, kernel, stride, padding, groups, dtype), (channels, *extent),
            compiled and n == rows, dtype)
# The ways, each alone; again the same list.
for name, dtype, shape, rows, f in (
        ("w-linear", torch.float32, (4096,), 1024, linear(4096, 4096)),
        ("w-linear-tf32", torch.float32, (4096,), 1024, linear(4096, 4096)),
        ("w-linear-bf16", torch.bfloat16, (4096,), 1024, linear(4096, 4096, torch.bfloat16)),
        ("w-direct", torch.float32, (16, 16, 64, 64), 16, conv3d(16, 16, (1, 3, 3), 1, (0, 1, 1))),
        ("w-cudnn", torch.float32, (32, 16, 56, 56), 16, conv3d(64, 32, (3, 3, 3), 2, 1)),
        ("w-norm", torch.float32, (32, 8, 64, 64), 16, group_norm(8, 32)),
        ("w-norm-small", torch.float32, (64, 8, 8), 4096, group_norm(16, 64)),
        ("w-tail", torch.float32, (16, 256, 256), 16, lambda x: F.dropout(torch.clamp(x, 0.25, 0.75), 0.2, True)),
        ("w-add", torch.float32, (16, 256, 256), 16, add(16, 1, 1)),
        ("w-amin", torch.float32, (8192,), 3072, lambda x: x.amin(dim=1)),
        ("w-amin-inner", torch.float32, (64, 64, 64), 96, lambda x: x.amin(dim=1))):
    torch.backends.cuda.matmul.allow_tf32 = name == "w-linear-tf32"
    say(name, rows, f, shape, compiled, dtype)
