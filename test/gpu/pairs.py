"""vLLM with NIXL: a prefill rank and two decode ranks on one GPU. Texts, transfers, the same ranks without
pools, deaths under load."""

import collections
import http.client
import itertools
import json
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from kit import POOL, SIMULATED, WORK, Node, empty_caches, kill_part, left, record, say
from table import SEEDS, engine, measured

MODEL = WORK + "/weights"  # made by the step weights: the text depends on the whole prompt
SETTINGS = """
      args:
        dtype: float16
        max_model_len: 8192
        max_num_seqs: 64
        kv_cache_memory_bytes: 6000000000
        gpu_memory_utilization: 0.1
        compilation_config: '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
        seed: 7
      env:
        VLLM_SERVER_DEV_MODE: "1"
        UCX_CUDA_IPC_ENABLE_GET_ZCOPY: "on"  # else, without NVLink, blocks go over TCP
      startup_timeout_s: 240"""


def node():
    return Node("pairs", 2400)


def up():
    node().deploy("pairs up", """applications:
  - name: pd
    model: {id: pd, source: %s}
    engine: %s
    prefill: {data_parallel: {dp_size: 1, coupling: independent}}
    decode: {data_parallel: {dp_size: 2, coupling: independent}}
    resources: {gpus: 0}
    disaggregation: {transfer: nixl, decide: always}
    graceful_shutdown_timeout_s: 10
""" % (MODEL, engine(SETTINGS)), logs=["pd.prefill/0/0", "pd.decode/0/0"])


def prompt(seed):
    draw = random.Random(seed)
    return " ".join(draw.choice("alpha beta gamma delta epsilon zeta eta theta".split()) for _ in range(400))


def ask(url, seed):
    """What came of a stream: text, whether it is whole, the prompt's way, the time to the first token."""
    a = dict(seed=seed, status=0, text="", whole=False, way=None, first=None)
    body = dict(model="pd", prompt=prompt(seed), max_tokens=24, temperature=0, ignore_eos=True, stream=True)
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    begin = time.time()
    try:
        r = urllib.request.urlopen(request, timeout=60)
        a["status"], a["way"] = r.status, r.headers.get("x-dpserve-prefill")
        for line in r:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if event.get("choices"):
                a["first"] = a["first"] or time.time() - begin
                a["text"] += event["choices"][0]["text"]
            a["whole"] = a["whole"] or line.startswith(b"data: [DONE]")
    except urllib.error.HTTPError as e:
        a["status"] = e.code
    except (OSError, ValueError, http.client.HTTPException):
        pass  # the stream was cut
    return a


def asked(url, seeds):
    """The same of many, 8 at a time."""
    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(lambda s: ask(url, s), seeds))


def truth(seeds):
    """The texts of one decode rank alone, which computes every prompt itself."""
    empty_caches(node())
    return {a["seed"]: a["text"] for a in asked(node().ranks("pd.decode")[0]["url"], seeds)}


def judge(name, answers, texts):
    """right: the text of an unbroken run. close: another one after at least 4 tokens, which rounding can do.
    wrong: another one before. cut: a stream that ended early; its beginning is judged too."""
    count = collections.Counter()
    for a in answers:
        want = texts[a["seed"]]
        same = len(os.path.commonprefix([a["text"], want]))
        count["wrong"] += a["status"] == 200 and same < min(4, len(a["text"]))
        if a["status"] != 200 or not a["whole"]:
            count["cut" if a["status"] == 200 else "refused"] += 1
        else:
            count["right"] += a["text"] == want
            count["close"] += a["text"] != want and same >= 4
        count["prompt: %s" % a["way"]] += 1
    firsts = sorted(a["first"] for a in answers if a["first"])
    record(name, first_token_p50_ms=1e3 * firsts[len(firsts) // 2], **count)


def transfers():
    """What vLLM has measured of the transfers, over both decode ranks."""
    sums = collections.Counter()
    for r in node().ranks("pd.decode"):
        page = urllib.request.urlopen(r["url"] + "/metrics", timeout=10).read().decode()
        line = r"^vllm:(nixl_\w+?_(?:sum|count|total))(?:\{[^}]*\})? (\S+)"
        for name, value in re.findall(line, page, re.M):
            sums[name] += float(value)
    record("transfers", **{k: v for k, v in sums.items() if v})


def texts():
    n = node()
    seeds = list(range(1000, 1048))
    alone, busy = [ask(n.url, s) for s in seeds[:16]], asked(n.url, seeds[16:])
    transfers()
    right = truth(seeds)
    judge("pairs, one by one", alone, right)
    judge("pairs, 8 at a time", busy, right)
    empty_caches(n)
    judge("the other decode rank alone, 8 at a time", asked(n.ranks("pd.decode")[1]["url"], seeds), right)
    say([line for line in n.cli("status", "pd")[1].splitlines() if line.startswith("pd: ")])


def death(name, victim, first_seed):
    """Requests all the time while a core is killed and comes back."""
    url, answers, stop, seeds = node().url, [], threading.Event(), itertools.count(first_seed)

    def client():
        while not stop.wait(0.4):
            answers.append(ask(url, next(seeds)))

    clients = [POOL.submit(client) for _ in range(6)]
    time.sleep(2)
    kill_part(victim, "EngineCore")
    gone, ready = node().back(victim)
    time.sleep(3)
    stop.set()
    [c.result() for c in clients]
    record(name, out_after=gone, ready_after=ready)
    judge(name, answers, truth([a["seed"] for a in answers]))
    transfers()


def kills():
    death("decode killed", node().ranks("pd.decode")[1], 40000)
    death("prefill killed", node().ranks("pd.prefill")[0], 20000)


def attach(other, arm):
    """The engines of up, on a node that knows where it sends what, and hears no KV events."""
    roles = [(r["url"], r["unit"].split("/")[0][3:]) for r in node().ranks("pd.")]
    ranks = ", ".join('{url: "%s", role: %s}' % (u, "both" if arm == "together" else r) for u, r in roles)
    return other.deploy("pairs: " + arm, """applications:
  - name: pd
    model: {id: pd}
    engine: {kind: attach, family: vllm, kv_events: off, ranks: [%s]}
    routing: {policy: mex, identity: tokens, params: {ttft_s: 0.5, tpot_s: 0.02}}
%s""" % (ranks, "" if arm == "together" else "    disaggregation: {transfer: nixl, decide: %s}\n" % arm), 30)


def connected(other):
    """Until every pair is: the first requests would find none."""
    for _ in range(100):
        pd = (other.answer("status").get("apps") or [{}])[0].get("pd") or {}
        if not pd or pd["connected"] == pd["all"]:
            return pd
        ask(other.url, 1)
        time.sleep(0.1)
    return pd


def table():
    """The same sessions, half of them with a long document: the three ranks as a pair, and as equal ranks."""
    other = Node("pairs-attached", 2600)
    for seed, arm in [(s, a) for s in SEEDS for a in ("together", "isl", "mex")]:
        other.cli("delete", "pd", "--yes")
        if left() < 30 or attach(other, arm):
            return say("pairs-table ends before", seed, arm)
        before = connected(other)
        empty_caches(node())
        b = other.bench(
            "pd", "--sessions", "96", "--rate", "8", "--turns", "2", "--think", "500ms", "--seed", seed,
            "--system-prompts", "0", "--long-share", "0.5", "--long-tokens", "3000" if SIMULATED else "1000",
            "--turn-tokens", "100", "--max-tokens", "64", "--ignore-eos", "--slo-ttft", "500ms", "--slo-tpot", "20ms")
        pd = (other.answer("status").get("apps") or [{}])[0].get("pd") or {}
        split = {k: pd[k] - before[k] for k in ("remote", "local", "fallbacks") if k in pd}
        measured("pairs.table", b, seed=seed, arm=arm, **split)


STEPS = {"pairs-up": up, "pairs-texts": texts, "pairs-table": table, "pairs-kill": kills}
