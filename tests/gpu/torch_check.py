#!/usr/bin/env python3
"""torch_check.py EVAL_GPU: both pipelines at real size on the GPU backend, against PyTorch's own results.

Weights and inputs are random; PyTorch computes in float32 with TF32 off, and in float64. Holds: |y - torch| within
1e-4 + 1e-4 |torch|, the largest error against float64 at most PyTorch's own, the dropout mask the same.
Exit status 77 without PyTorch or a GPU."""
import json, os, struct, subprocess, sys, tempfile

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("no PyTorch here")
    sys.exit(77)
if not torch.cuda.is_available():
    print("PyTorch sees no GPU")
    sys.exit(77)
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
failed = 0


def raw(t):
    return t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def save(path, tensors):
    header, data = {}, b""
    for name, t in tensors.items():
        piece = raw(t)
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def run(folder, conf, x, shape, dtype, train=()):
    with open(folder + "/m.conf", "w") as f:
        f.write(conf)
    with open(folder + "/x", "wb") as f:
        f.write(raw(x))
    r = subprocess.run([sys.argv[1], folder + "/m.conf", folder + "/x", folder + "/y", *map(str, train)],
                       stdin=subprocess.DEVNULL, timeout=120)
    if r.returncode != 0:
        sys.exit(f"eval_gpu: exit status {r.returncode}")
    with open(folder + "/y", "rb") as f:
        y = torch.frombuffer(bytearray(f.read()), dtype=dtype)
    return y.reshape(shape).cuda()


def check(name, ok, text):
    global failed
    failed += not ok
    print(f"{'ok' if ok else 'FAILED':6} {name}: {text}", flush=True)


def errors(name, y, theirs, wide, factor=1.0, within=True):
    ours_err = (y.double() - wide).abs().max().item()
    theirs_err = (theirs.double() - wide).abs().max().item()
    apart = ((y - theirs).abs().double() - 1e-4 * theirs.abs().double()).max().item()
    check(name, ours_err <= factor * theirs_err, f"largest error {ours_err:.3g}, PyTorch's {theirs_err:.3g}")
    if within:
        check(name, apart <= 1e-4, f"furthest from PyTorch, less 1e-4 of it: {apart:.3g}")


def pipeline_a(folder, dtype, precision, rows, factor, within):
    k = c = 8192
    torch.manual_seed(1)
    bound = k ** -0.5
    w = (torch.rand(c, k, device="cuda") * 2 - 1).mul_(bound).to(dtype)
    b = (torch.rand(c, device="cuda") * 2 - 1).mul_(bound).to(dtype)
    g, h = torch.ones(c, device="cuda", dtype=dtype), torch.zeros(c, device="cuda", dtype=dtype)
    t = torch.randn(1, c, 1, 1, device="cuda").to(dtype)
    x = torch.rand(rows, k, device="cuda").to(dtype)
    save(folder + "/w.safetensors", {"w": w, "b": b, "g": g, "h": h, "t": t})
    name = str(dtype).split(".")[1]
    y = run(folder, f'''name = "a"; weights = "w.safetensors"; dtype = "{name}"; precision = "{precision}";
input = {{ shape = [{k}]; }};
stages = ({{ op = "linear"; weight = "w"; bias = "b"; }}, {{ op = "group_norm"; groups = 512; weight = "g"; bias = "h"; }},
{{ op = "amin"; dim = 1; keepdim = true; }}, {{ op = "add"; tensor = "t"; }});
''', x, (1, c, rows, 1), dtype)
    chain = lambda x, w, b, g, h, t: F.group_norm(F.linear(x, w, b), 512, g, h).amin(dim=1, keepdim=True) + t
    theirs = chain(x, w, b, g, h, t)
    wide = chain(*(v.double() for v in (x, w, b, g, h, t)))
    errors(f"A {name} {precision} N={rows}", y, theirs, wide, factor, within)


def pipeline_b(folder, rows, minimum, train):
    torch.manual_seed(2)
    bound = 81 ** -0.5
    w = (torch.rand(16, 3, 3, 3, 3, device="cuda") * 2 - 1) * bound
    b = (torch.rand(16, device="cuda") * 2 - 1) * bound
    g, h = torch.rand(16, device="cuda") + 0.5, torch.rand(16, device="cuda") - 0.5
    x = torch.randn(rows, 3, 16, 64, 64, device="cuda")
    x[1, 2, 3, 4, 5] = float("nan")
    save(folder + "/w.safetensors", {"w": w, "b": b, "g": g, "h": h})
    y = run(folder, f'''name = "b"; weights = "w.safetensors"; input = {{ shape = [3, 16, 64, 64]; }};
stages = ({{ op = "conv3d"; weight = "w"; bias = "b"; }}, {{ op = "group_norm"; groups = 8; weight = "g"; bias = "h"; }},
{{ op = "minimum"; value = {minimum}; }}, {{ op = "clamp"; min = 0.0; max = 1.0; }}, {{ op = "dropout"; p = 0.2; }});
''', x, (rows, 16, 14, 62, 62), torch.float32, (1234, 0) if train else ())

    def chain(x, w, b, g, h):
        v = F.group_norm(F.conv3d(x, w, b), 8, g, h)
        return torch.clamp(torch.minimum(v, torch.tensor(minimum, device="cuda", dtype=v.dtype)), 0.0, 1.0)
    theirs, wide = chain(x, w, b, g, h), chain(*(v.double() for v in (x, w, b, g, h)))
    if train:
        torch.cuda.manual_seed(1234)
        mask = F.dropout(torch.ones_like(theirs), 0.2, True)
        theirs, wide = theirs * mask, wide * mask.double()
    name = f"B minimum {minimum} N={rows}{' training' if train else ''}"
    check(name, bool((y.isnan() == theirs.isnan()).all()), f"{int(y.isnan().sum())} NaN")
    y, theirs, wide = (torch.nan_to_num(v, nan=0.0) for v in (y, theirs, wide))
    if train and minimum != 0.0:
        check(name, bool(((y == 0) | (mask != 0)).all()), "nothing is where the mask drops")
    errors(name, y, theirs, wide, 1.0 if minimum == 0.0 else 2.0)


with tempfile.TemporaryDirectory() as folder:
    pipeline_a(folder, torch.float32, "fp32", 1024, 1.0, True)
    pipeline_a(folder, torch.float32, "tf32", 1024, 1000.0, False)
    pipeline_a(folder, torch.bfloat16, "fp32", 1024, 2.0, False)
    pipeline_a(folder, torch.float16, "fp32", 64, 2.0, False)
    pipeline_b(folder, 16, 0.5, False)
    pipeline_b(folder, 16, 0.5, True)
    pipeline_b(folder, 128, 0.0, True)
print(f"{failed} failed")
sys.exit(1 if failed else 0)
