"""SGLang: two servers on one GPU. Routes, predictions, load, deaths; a server that dpserve did not start."""

import os
import re
import signal
import subprocess
import sys
import time

from kit import POOL, PORTS, SIMULATED, WORK, Node, kill_part, post, predictions, record, run, say
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
    return Node("sglang", 4800)


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
    predictions(n, "sg", 12, "/generate", "g")
    messages = [dict(role="user", content="hello there, who are you?")]
    body = dict(model="sg", messages=messages, max_tokens=8)
    status, _, answer, _ = post(n.url, "/v1/chat/completions", body)
    record("sglang chat", status=status, answer=str(answer)[:200])
    b = n.bench("sg", "--concurrency", "32", "--duration", "6s", "--max-tokens", "64", "--ignore-eos")
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


# Two ranks in one process, both on the first device: without its assertions SGLang takes a step of 0.
HAND, EVENTS = PORTS + 6800, PORTS + 6850
ARGV = [sys.executable, "-O", "-m", "sglang.launch_server", "--model-path", MODEL,
        "--served-model-name", "sg", "--host", "127.0.0.1", "--port", str(HAND), "--dp-size", "2",
        "--gpu-id-step", "0", "--enable-metrics", "--enable-cache-report", "--kv-events-config",
        '{"publisher": "zmq", "endpoint": "tcp://*:%d", "topic": ""}' % EVENTS]


def flags():
    """Those of SETTINGS, as words of a command line."""
    found = re.findall(r"^        (\w+): (\S+)", SETTINGS, re.M)
    words = [("--" + k.replace("_", "-"), v) for k, v in found]
    return [w for k, v in words for w in ((k,) if v == "true" else (k, v))]


def hand():
    """Starts a server by hand."""
    if not SIMULATED:
        log = open(WORK + "/hand.log", "a")
        p = subprocess.Popen(ARGV + flags(), stdout=log, stderr=log, start_new_session=True)
        open(WORK + "/hand.pid", "w").write(str(p.pid))


def end_hand():
    try:
        os.killpg(int(open(WORK + "/hand.pid").read()), signal.SIGKILL)
    except (OSError, ValueError):
        pass  # it was not started, or has ended


def attached():
    """The server of hand, attached by its two ranks; a launched one comes and goes by SGLang's router API."""
    n, url = Node("sglang-attached", 4600, "--router-api"), "http://127.0.0.1:%d" % HAND
    launched = [r["url"] for r in node().ranks()]
    rank = '{url: "%s", addressing: header, selector: %d, kv_events: {connect: "tcp://127.0.0.1:%d"}}'
    ranks = [rank % (url, i, EVENTS + i) for i in (0, 1)]
    if SIMULATED:
        ranks = ['{url: "%s"}' % launched[0]]
    n.deploy("sglang attached", """applications:
  - name: sg
    model: {id: sg}
    engine: {kind: attach, family: %s, ranks: [%s]}
    routing: {policy: mex, identity: %s}
    graceful_shutdown_timeout_s: 10
""" % ("openai" if SIMULATED else "sglang", ", ".join(ranks), "text" if SIMULATED else "tokens"), 150)
    predictions(n, "sg", 12, word="a")
    predictions(n, "sg", 12, "/generate", "b")
    say([(r["phase"], r.get("kv", {}).get("events")) for r in n.ranks()])
    for verb in ("add", "remove"):
        status, _, answer, _ = post(n.url, "/%s_worker?url=%s" % (verb, launched[1]), {})
        begin, wanted = time.time(), len(ranks) + (verb == "add")
        while [r["phase"] for r in n.ranks()] != ["ready"] * wanted and time.time() < begin + 20:
            time.sleep(0.05)
        b = n.bench("sg", "--concurrency", "24", "--duration", "4s", "--max-tokens", "48", "--ignore-eos")
        record("sglang %s_worker" % verb, status=status, answer=str(answer)[:200], ok=b.get("ok"), failed=b.get("failed"), errors=b.get("errors"), ranks=b.get("ranks"))


def attention():
    """DP attention with two ranks on one device: how far does it come?"""
    argv = [*ARGV, "--tp-size", "2", "--enable-dp-attention", *flags()]
    argv[argv.index(str(HAND))] = str(HAND + 1)
    argv[argv.index("--kv-events-config"):][:2] = []
    code, out, err = (0, "", "") if SIMULATED else run(*argv, limit=100, NCCL_DEBUG="WARN")
    told = [line for line in (out + err).splitlines() if re.search("NCCL|Duplicate|Error|assert", line)]
    record("sglang dp attention", code=code, text="\n".join(told[-12:])[-1500:])


STEPS = {"sglang-up": up, "sglang-hand": hand, "sglang-check": check, "sglang-attached": attached,
         "sglang-kill": kill, "sglang-dp-attention": attention}
