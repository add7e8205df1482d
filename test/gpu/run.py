#!/usr/bin/env python3
"""Real engines on a GPU under dpserve; docs/real-engines.md says what was seen.

    run.py [STEP ...]     without steps: all that the installed engines allow, and then down
    run.py down           ends what the steps have left running

Steps of vLLM: up check cost table kill adopt refused; with NIXL: weights pairs-up pairs-texts pairs-table
pairs-kill; of SGLang: weights sglang-up sglang-hand sglang-check sglang-attached sglang-kill
sglang-dp-attention. Environment: DPSERVE (the program), GPU_WORK (folder of data, logs and results.jsonl),
PORTS (the first of 7,000), SECONDS_LEFT, POLICIES, SEEDS, LOADS; ENGINE=sim runs the steps on simulated
engines, which shows that they work."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import traceback

import kit
import pairs
import servers
import table

HERE = os.path.dirname(os.path.abspath(__file__))
# The KV cache of a token is 128 KiB, as large as that of a model of 8 billion parameters; the rest is small.
SHAPE = dict(hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
             num_key_value_heads=16, head_dim=128, max_position_embeddings=32768, torch_dtype="float16")


def weights():
    """Makes the model of the steps that compare texts."""
    target, source, tiny = kit.WORK + "/weights", kit.WORK + "/shape", HERE + "/../vllm/testdata"
    if kit.SIMULATED or os.path.exists(target + "/model.safetensors"):
        return
    shutil.copytree(tiny + "/tiny-qwen2", source, dirs_exist_ok=True)
    with open(source + "/config.json") as f:
        config = json.load(f)
    with open(source + "/config.json", "w") as f:
        json.dump({**config, **SHAPE}, f)
    subprocess.run([sys.executable, tiny + "/mkweights.py", source, target], check=True)


def down():
    for name, base in (("table", 0), ("attached", 200), ("refused", 400), ("pairs", 2400),
                       ("pairs-attached", 2600), ("sglang-attached", 4600), ("sglang", 4800)):
        n = kit.Node(name, base, start=False)
        if n.runs():
            n.cli("delete", *(a["name"] for a in n.answer("status").get("apps", [])), "--yes")
            n.kill(15)
    servers.end_hand()
    kit.record("down", device=kit.device())


STEPS = {"weights": weights, **table.STEPS, **pairs.STEPS, **servers.STEPS, "down": down}


def allowed():
    """The steps that this machine allows. A line says why others are skipped."""
    has = lambda module: kit.SIMULATED or importlib.util.find_spec(module)
    if not kit.SIMULATED and not kit.device():
        kit.say("skipped: nvidia-smi finds no GPU")
        return []
    steps = ["weights"]
    if kit.SIMULATED or shutil.which("vllm"):
        steps += table.STEPS
        if has("nixl"):
            steps += pairs.STEPS
        else:
            kit.say("skipped: the pairs, because NIXL is not installed for", sys.executable)
    else:
        kit.say("skipped: vLLM, because there is no vllm in PATH")
    if has("sglang"):
        steps += servers.STEPS
    else:
        kit.say("skipped: SGLang, because it is not installed for", sys.executable)
    return [*steps, "down"] if len(steps) > 1 else []


def main(chosen):
    for step in chosen:
        if step not in STEPS:
            raise SystemExit("no step %s; there are: %s" % (step, " ".join(STEPS)))
    for step in chosen:
        kit.say("---", step)
        try:
            STEPS[step]()
        except Exception:  # the next step may work all the same
            kit.record("failed", step=step, why=traceback.format_exc())


os.makedirs(kit.WORK, exist_ok=True)
main(sys.argv[1:] or allowed())
