"""Measure Hugging Face transformers' generate (random weights) on the equal-length workloads. Usage: peer_hf.py SHAPE OUT.json"""
import json, os, sys, time, statistics as st
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch, transformers
from benchmarks.shapes import SHAPES
import benchmarks.workloads as W

shape, out = sys.argv[1], sys.argv[2]
cfg = {k: v for k, v in SHAPES[shape].items() if k not in ("architectures", "torch_dtype", "norm_eps", "model_type", "num_hidden_layers")}
cfg = transformers.NemotronHConfig(**cfg)
t = time.time()
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    m = transformers.NemotronHForCausalLM(cfg).eval()
print("built", sum(p.numel() for p in m.parameters()) / 1e9, "B params in", time.time() - t, flush=True)
res = {"engine": "transformers " + transformers.__version__, "shape": shape, "rows": {}}
for k, w in enumerate(W.build(0)):
    if w.name in ("mixed_64", "shared_prefix_32", "decode_b256"):
        continue
    n = min(w.max_tokens, 64)
    try:
        times = []
        for rep in range(3):
            ww = W.build(10 + rep)[k]
            x = torch.tensor(ww.prompts, device="cuda")
            torch.cuda.synchronize(); t0 = time.perf_counter()
            with torch.inference_mode():
                o = m.generate(x, max_new_tokens=n, min_new_tokens=n, do_sample=False, attention_mask=torch.ones_like(x))
            torch.cuda.synchronize(); times.append(time.perf_counter() - t0)
        res["rows"][w.name] = {"seconds": sorted(times), "median": st.median(times), "requests": len(w.prompts), "in_tokens": sum(map(len, w.prompts)), "out_tokens": n * len(w.prompts)}
        print(w.name, n, [round(x, 3) for x in times], flush=True)
    except Exception as e:
        print(w.name, "failed", repr(e)[:300], flush=True); torch.cuda.empty_cache()
json.dump(res, open(out, "w"), indent=1)
