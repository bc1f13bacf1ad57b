"""Measure SGLang (dummy weights) on the shared workloads. Usage: peer_sglang.py SHAPE OUT.json"""
import json, os, sys, tempfile, time, statistics as st
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from benchmarks.shapes import SHAPES
import benchmarks.workloads as W


def main():
    shape, out = sys.argv[1:3]
    d = tempfile.mkdtemp(); cfg = dict(SHAPES[shape]); cfg["mamba_ssm_dtype"] = "float32"
    json.dump(cfg, open(d + "/config.json", "w"))
    import sglang as sgl
    t0 = time.time()
    llm = sgl.Engine(model_path=d, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", attention_backend="flashinfer", context_length=8192,
                     mem_fraction_static=0.8, max_running_requests=256, chunked_prefill_size=8192, log_level="warning", random_seed=0,
                     sampling_backend="pytorch", disable_custom_all_reduce=True, mamba_ssm_dtype="float32")
    ready = time.time() - t0
    print("sglang", sgl.__version__, "ready in", round(ready, 1), flush=True)
    res = {"engine": "sglang " + sgl.__version__, "shape": shape, "startup_s": ready, "rows": {}}

    def run(prompts, n):
        sp = {"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True}
        t = time.perf_counter(); o = llm.generate(input_ids=prompts, sampling_params=sp); dt = time.perf_counter() - t
        assert all(x["meta_info"]["completion_tokens"] == n for x in o)
        return dt, sum(x["meta_info"].get("cached_tokens", 0) for x in o)

    for w in W.build(77):
        run(w.prompts, min(w.max_tokens, 8))
    for k, w in enumerate(W.build(0)):
        ts, c = [], 0
        for rep in range(3):
            ww = W.build(10 + rep)[k]
            if w.warm:
                run([ww.prompts[0][:4096] + W.tokens(999 + rep, 128)], 1)
            dt, c = run(ww.prompts, ww.max_tokens); ts.append(dt)
        res["rows"][w.name] = {"median": st.median(ts), "seconds": ts, "cached": c}
        print(w.name, [round(x, 4) for x in ts], "cached", c, flush=True)
        json.dump(res, open(out, "w"), indent=1)
    llm.shutdown()


if __name__ == "__main__":
    main()
