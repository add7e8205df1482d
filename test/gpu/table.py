"""vLLM: four ranks that share one GPU. Predictions, step times, routing policies under load, deaths."""

import json
import os
import shutil
import statistics
import time

from kit import POOL, SIMULATED, WORK, Node, device, empty_caches, kill_part, left, post, predictions
from kit import record, say

HERE = os.path.dirname(os.path.abspath(__file__))
TTFT, TPOT = 0.5, 0.05  # the goals, seconds
SETTINGS = """
      args:
        load_format: dummy
        max_model_len: 16384
        max_num_seqs: 64
        kv_cache_memory_bytes: %d
        compilation_config: '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
        seed: 7
      env: {VLLM_SERVER_DEV_MODE: "1"}  # for /reset_prefix_cache
      startup_timeout_s: 240"""
POLICIES = os.environ.get("POLICIES", "mex,round-robin,power-of-two,least-loaded,cache-aware").split(",")
SEEDS = os.environ.get("SEEDS", "1,2,3").split(",")
LOADS = os.environ.get("LOADS", "24x1.6,36x2.4").split(",")  # sessions x new sessions per second


def engine(settings, kind="vllm"):
    return "{kind: sim}" if SIMULATED else "\n      kind: %s%s" % (kind, settings)


def model():
    """The folder of the model: MODEL, or the shape of model.json with the tokenizer of ../vllm."""
    if "MODEL" in os.environ:
        return os.environ["MODEL"]
    folder = WORK + "/model"
    shutil.copytree(HERE + "/../vllm/testdata/tiny-qwen2", folder, dirs_exist_ok=True)
    shutil.copy(HERE + "/model.json", folder + "/config.json")
    return folder


def app(name, ranks, gpus, settings):
    return """applications:
  - name: %s
    model: {id: %s, source: %s}
    engine: %s
    data_parallel: {dp_size: %d, coupling: independent}
    resources: {gpus: %s}
    routing: {policy: mex, identity: tokens, params: {ttft_s: %g, tpot_s: %g}}
    graceful_shutdown_timeout_s: 10
""" % (name, name, model(), engine(settings), ranks, 0 if SIMULATED else gpus, TTFT, TPOT)


def node():
    return Node("table", 0)


def urls():
    return [r["url"] for r in node().ranks()]


def up():
    node().deploy("up", app("four", 4, 0.25, SETTINGS % 6e9), logs=["four/0/0"])


def check():
    predictions(node(), "four", 24)


def cost():
    """What a prompt and a token take on a rank while all are idle, beside what mex expects."""
    url, seed = urls()[0], int(time.time())
    unique = lambda n, i: ("%d %d " % (seed, i) + "abcdefgh " * (n // 8))[:n]
    for i, n in enumerate((1000, 2000, 4000, 8000, 15000)):
        bodies = [dict(model="four", prompt=unique(n, 10 * i + k), max_tokens=1) for k in range(4)]
        answers = [post(url, "/v1/completions", b) for b in bodies[:3]]
        path = WORK + "/explain.json"
        json.dump(bodies[3], open(path, "w"))
        rank = node().answer("route", "explain", "four", "-f", path)["ranks"][0]
        terms = {t["name"]: t["value"] for t in rank["terms"]}
        record("cost.prompt", tokens=answers[0][2]["usage"]["prompt_tokens"], mex_ms=terms["prefill"],
               measured_ms=statistics.median(a[3] for a in answers) * 1e3)
    for clients in (1, 8, 32):
        b = node().bench("four", "--concurrency", str(clients), "--requests", str(2 * clients),
                         "--prompt-bytes", "1000", "--max-tokens", "100", "--ignore-eos", "--seed", str(seed),
                         url=url)
        record("cost.token", clients=clients, measured_ms=b["tpot"]["p50_ms"])
    model = node().answer("router", "show", "four").get("cost_model", {})
    record("cost.factors", **{k: v for k, v in model.items() if k != "ranks"})


def attach(other, policy):
    ranks = ", ".join('{url: "%s"}' % u for u in urls())
    return other.deploy("policy " + policy, """applications:
  - name: four
    model: {id: four}
    engine: {kind: attach, family: %s, ranks: [%s]}
    routing: {policy: %s}
""" % ("openai" if SIMULATED else "vllm", ranks, policy), 30)


def measured(kind, b, **cell):
    """One row of a table, from the report of bench."""
    if b:
        percentiles = lambda name: [round(b[name]["p%d_ms" % q], 1) for q in (50, 95, 99)]
        record(kind, **cell, goodput=b["goodput"]["share"], ok=b["ok"], failed=b["failed"],
               ttft=percentiles("ttft"), tpot=percentiles("tpot"), hit=b["hit_share"],
               of_perfect=b["sessions"]["of_oracle"], ranks=sorted(b["ranks"].values()))


def table():
    """The same sessions under each policy, with empty caches. mex is routed by the node that launched the
    ranks, the others by a second node that has them attached: they read no KV events, and a change of that
    would start the engines anew."""
    other, attached = Node("attached", 200), "mex"
    for load, seed, policy in [(x, s, p) for x in LOADS for s in SEEDS for p in POLICIES]:
        if left() < 35:
            return say("no time for", load, seed, policy)
        if policy not in ("mex", attached):
            if attach(other, policy):
                continue
            attached = policy
        empty_caches(node())
        sessions, rate = load.split("x")
        b = (node() if policy == "mex" else other).bench(
            "four", "--sessions", sessions, "--rate", rate, "--turns", "4", "--think", "500ms",
            "--seed", seed, "--system-prompts", "8", "--system-tokens", "1500", "--turn-tokens", "250",
            "--max-tokens", "64", "--ignore-eos", "--slo-ttft", "%gs" % TTFT, "--slo-tpot", "%gs" % TPOT)
        measured("table", b, load=load, seed=seed, policy=policy)


def kill():
    """The core of a rank, under load."""
    n = node()
    load = POOL.submit(n.bench, "four", "--concurrency", "48", "--duration", "25s", "--max-tokens", "64",
                       "--ignore-eos")
    time.sleep(4)
    victim, used = n.ranks()[2], device()
    lowest = POOL.submit(lambda: min(device() or () for _ in range(60)))  # the first seconds after its end
    kill_part(victim, "EngineCore")
    gone, ready = n.back(victim)
    b = load.result()
    record("kill core", out_after=gone, ready_after=ready, ok=b["ok"], failed=b["failed"],
           errors=b.get("errors"), device_before=used, device_lowest=lowest.result(), device_after=device())


def adopt():
    """dpserve itself, killed under load and started again."""
    n = node()
    load = POOL.submit(n.bench, "four", "--concurrency", "16", "--duration", "4s", "--max-tokens", "64",
                       "--ignore-eos")
    time.sleep(2)
    seconds, same = n.killed_and_back(4)
    b = load.result()
    record("adopt", ready_after=seconds, same_engines=same, ok=b["ok"], failed=b["failed"],
           errors=b.get("errors"))
    predictions(n, "four", 9)


def refused():
    """A start that cannot work: the KV cache holds no request of max_model_len."""
    n = Node("refused", 400)
    settings = (SETTINGS % 1e8).replace("seed: 7", "gpu_memory_utilization: 0.1")
    n.deploy("refused", app("small", 1, 0, settings))
    n.cli("delete", "small", "--yes")
    n.kill(15)


STEPS = dict(up=up, check=check, cost=cost, table=table, kill=kill, adopt=adopt, refused=refused)
