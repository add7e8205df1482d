"""SGLang: two servers on one GPU. Routes, predictions, load, deaths."""

import time

from kit import POOL, WORK, Node, kill_part, post, predictions, record
from table import engine

MODEL = WORK + "/weights"  # made by the step weights
SETTINGS = """
      args:
        dtype: float16
        attention_backend: triton
        sampling_backend: pytorch
        grammar_backend: none
        context_length: 8192
        mem_fraction_static: 0.9  # of what is free; max_total_tokens bounds it
        max_total_tokens: 40000
        disable_cuda_graph: true
        sleep_on_idle: true
        random_seed: 7
      startup_timeout_s: 300"""


def node():
    return Node("sglang", 22800)


def up():
    node().deploy("sglang up", """applications:
  - name: sg
    model: {id: sg, source: %s}
    engine: %s
    data_parallel: {dp_size: 2, coupling: independent}
    resources: {gpus: 0}
    routing: {policy: mex, identity: tokens}
    graceful_shutdown_timeout_s: 10
""" % (MODEL, engine(SETTINGS, "sglang")), logs=["sg/0/0"])


def check():
    n = node()
    predictions(n, "sg", 24)
    messages = [dict(role="user", content="hello there, who are you?")]
    for path, body in (("/v1/chat/completions", dict(model="sg", messages=messages, max_tokens=8)),
                       ("/generate", dict(text="hello there", sampling_params=dict(max_new_tokens=8)))):
        status, _, answer, _ = post(n.url, path, body)
        record("sglang " + path, status=status, answer=str(answer)[:200])
    b = n.bench("sg", "--concurrency", "32", "--duration", "10s", "--max-tokens", "64", "--ignore-eos")
    record("sglang load", ok=b["ok"], failed=b["failed"], errors=b.get("errors"), ranks=b["ranks"],
           tokens_per_s=b["output_tokens_per_s"], events=[r.get("kv", {}).get("events") for r in n.ranks()])


def kill():
    n = node()
    load = POOL.submit(n.bench, "sg", "--concurrency", "16", "--duration", "20s", "--max-tokens", "48",
                       "--ignore-eos")
    time.sleep(3)
    victim = n.ranks()[1]
    kill_part(victim, "scheduler")
    gone, ready = n.back(victim)
    b = load.result()
    record("sglang scheduler killed", out_after=gone, ready_after=ready, ok=b["ok"], failed=b["failed"],
           errors=b.get("errors"))
    seconds, same = n.killed_and_back(2)
    record("sglang adopt", ready_after=seconds, same_engines=same)
    predictions(n, "sg", 9)


STEPS = {"sglang-up": up, "sglang-check": check, "sglang-kill": kill}
