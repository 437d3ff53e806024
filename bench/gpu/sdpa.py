# Times PyTorch's scaled dot-product attention (dense softmax) for one query token, on the shapes of entmaxkv-gpu-time.
# SPDX-License-Identifier: Apache-2.0
#
# Usage: python3 sdpa.py [heads] [group] [dim] [max]
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

heads, group, dim, most = ([int(x) for x in sys.argv[1:]] + [16, 1, 128, 1 << 20][len(sys.argv) - 1:])[:4]
k = torch.randn(1, heads, most, dim, device="cuda", dtype=torch.float16)
v = torch.randn(1, heads, most, dim, device="cuda", dtype=torch.float16)
q = torch.randn(1, heads * group, 1, dim, device="cuda", dtype=torch.float16)
print("sdpa: tokens, median ms per step by CUDA events over a graph replay")
for n in [4096, 32768, 131072, 524288, 1048576]:
    if n > most:
        break
    parts = min(16, most // n)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        views = [(k[:, :, i * n:(i + 1) * n], v[:, :, i * n:(i + 1) * n]) for i in range(parts)]

        def step():
            for key, value in views:
                F.scaled_dot_product_attention(q, key, value, enable_gqa=group > 1)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        times = []
        for i in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / parts)
        print(f"sdpa {n:8d} {sorted(times[2:])[5]:9.4f}", flush=True)
