"""Measure vLLM (dummy weights) on the shared workloads. Usage: peer_vllm.py SHAPE OUT.json [k=v engine args]"""
import json, os, sys, tempfile, time, statistics as st

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
from benchmarks.shapes import SHAPES
import benchmarks.workloads as W


def realistic(model):
    """Weights that route and scan like a trained model's: spread routing, decays in the usual range."""
    import torch
    g = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for name, p in list(model.named_parameters()) + list(model.named_buffers()):
            if not p.is_floating_point():
                continue
            if name.endswith("e_score_correction_bias"):
                p.zero_()
            elif name.endswith("dt_bias"):
                dt = torch.exp(torch.rand(p.shape, generator=g, device=p.device) * 4.6 - 6.9)
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif name.endswith(".A"):
                p.copy_(-(1 + 15 * torch.rand(p.shape, generator=g, device=p.device)))
            elif name.endswith(".D") or ("norm" in name and name.endswith("weight")):
                p.fill_(1)
            elif name.endswith("bias"):
                p.zero_()
            elif p.dim() >= 2:
                p.normal_(0, 0.02, generator=g)
    print("weights drawn:", sum(q.numel() for q in model.parameters()) / 1e9, "B", flush=True)
    return True


def main():
    shape, out = sys.argv[1], sys.argv[2]
    extra = {}
    for a in sys.argv[3:]:
        k, v = a.split("=", 1)
        try:
            v = json.loads(v)
        except ValueError:
            pass
        extra[k] = v
    d = tempfile.mkdtemp()
    json.dump(SHAPES[shape], open(d + "/config.json", "w"))
    from vllm import LLM, SamplingParams
    import vllm

    t0 = time.time()
    args = dict(model=d, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192,
                gpu_memory_utilization=0.85, enable_prefix_caching=True, max_num_seqs=256, max_num_batched_tokens=8192,
                seed=0, trust_remote_code=False)
    args.update(extra)
    llm = LLM(**args)
    print("vllm", vllm.__version__, "ready in", round(time.time() - t0, 1), flush=True)
    res = {"engine": "vllm " + vllm.__version__, "shape": shape, "args": {k: str(v) for k, v in args.items() if k != "model"}, "rows": {}}

    if not os.environ.get("KEEP_DUMMY"):
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        llm.apply_model(realistic)

    def run(prompts, n):
        sp = SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
        t = time.perf_counter()
        o = llm.generate([{"prompt_token_ids": p} for p in prompts], sp, use_tqdm=False)
        dt = time.perf_counter() - t
        assert all(len(x.outputs[0].token_ids) == n for x in o)
        return dt

    # throwaway warm-up of kernels on other tokens
    for w in W.build(77):
        run(w.prompts, min(w.max_tokens, 8))
    for k, w in enumerate(W.build(0)):
        times = []
        for rep in range(3):
            ww = W.build(10 + rep)[k]
            if w.warm:
                base = ww.prompts[0][:4096]
                run([base + W.tokens(999 + rep, 128)], 1)
            times.append(run(ww.prompts, ww.max_tokens))
        res["rows"][w.name] = {"seconds": sorted(times), "median": st.median(times), "requests": len(w.prompts),
                               "in_tokens": sum(map(len, w.prompts)), "out_tokens": len(w.prompts) * w.max_tokens}
        print(w.name, [round(x, 4) for x in times], flush=True)
    json.dump(res, open(out, "w"), indent=1)


if __name__ == "__main__":
    main()
