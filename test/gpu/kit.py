"""What the steps of run.py share: dpserve as a process, HTTP, processes, the device."""

import collections
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

BEGIN = time.time()
DPSERVE = os.environ.get("DPSERVE", "bin/dpserve")
WORK = os.environ.get("GPU_WORK", "/tmp/dpserve-gpu")  # data folders, logs, results
SIMULATED = os.environ.get("ENGINE") == "sim"  # no GPU: shows that the steps themselves work
END = BEGIN + float(os.environ.get("SECONDS_LEFT", "36000"))  # the table ends by then
PORTS = int(os.environ.get("PORTS", "18000"))  # up to 7,000 above it
POOL = ThreadPoolExecutor(64)  # for what runs beside a step


def left():
    return END - time.time()


def say(*words):
    print("[%6.1f]" % (time.time() - BEGIN), *words, flush=True)


def record(kind, **fields):
    """A line for people and one for programs."""
    say(kind, " ".join("%s=%s" % (k, "%.4g" % v if isinstance(v, float) else v) for k, v in fields.items()))
    with open(WORK + "/results.jsonl", "a") as out:
        out.write(json.dumps(dict(fields, kind=kind)) + "\n")


def run(*argv, limit=60, **env):
    try:
        r = subprocess.run(argv, capture_output=True, text=True, timeout=limit, env=dict(os.environ, **env))
        return r.returncode, r.stdout, r.stderr
    except subprocess.TimeoutExpired:
        return 124, "", "no end after %d s" % limit
    except OSError as e:
        return 127, "", str(e)


class Node:
    """A node of its own, on ports from PORTS + base on. One that runs already is used as it is."""

    def __init__(self, name, base, *flags, start=True):
        self.name, self.base, self.flags = name, PORTS + base, flags
        self.url = "http://127.0.0.1:%d" % self.base
        self.pidfile = "%s/%s.pid" % (WORK, name)
        if start and not self.runs():
            self.start()

    def pid(self):
        try:
            return int(open(self.pidfile).read())
        except (OSError, ValueError):
            return 0

    def runs(self):
        try:
            stat = open("/proc/%d/stat" % self.pid()).read()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] != "Z"

    def start(self):
        log, at = open("%s/%s.log" % (WORK, self.name), "a"), "127.0.0.1:%d"
        p = subprocess.Popen(
            [DPSERVE, "start", "--data-dir", "%s/%s" % (WORK, self.name), "--http-bind", at % self.base,
             "--admin-bind", at % (self.base + 1), "--node-port", str(self.base + 2),
             "--gossip-port", str(self.base + 3),
             "--port-range", "%d-%d" % (self.base + 1000, self.base + 1999), *self.flags],
            stdout=log, stderr=log, start_new_session=True)
        open(self.pidfile, "w").write(str(p.pid))
        self.process = p  # else Python waits for it
        for _ in range(300):
            if self.cli("status")[0] == 0:
                return
            if p.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit("dpserve does not start: see %s/%s.log" % (WORK, self.name))

    def kill(self, how=signal.SIGKILL):
        if self.runs():
            os.kill(self.pid(), how)
        while self.runs():
            time.sleep(0.02)

    def cli(self, *argv, limit=60):
        return run(DPSERVE, *argv, limit=limit, DPSERVE_ADDR="127.0.0.1:%d" % (self.base + 1))

    def answer(self, *argv):
        """What a command says with -o json; {}: nothing."""
        try:
            return json.loads(self.cli(*argv, "-o", "json")[1])
        except ValueError:
            return {}

    def deploy(self, kind, text, limit=300, logs=()):
        """Deploys a file, and records how that ended and how long it took."""
        path = "%s/%s.yaml" % (WORK, self.name)
        open(path, "w").write(text)
        begin = time.time()
        code, out, err = self.cli("deploy", path, limit=limit)
        text = (out + err)[-1500:] if code else ""
        record(kind, code=code, seconds=time.time() - begin, device=device(), text=text)
        for unit in logs if code else ():
            say(self.cli("logs", unit, "--tail", "40")[1][-3000:])
        return code

    def ranks(self, prefix=""):
        """The ranks of all applications and pools, by unit."""
        apps = self.answer("status").get("apps", [])
        pools = [a.get(pool) for a in apps for pool in ("prefill", "decode")]
        units = [u for a in apps + pools if isinstance(a, dict) for u in a.get("units", [])]
        found = [dict(r, unit=u["unit"]) for u in units for r in u.get("ranks", [])]
        return sorted((r for r in found if r["unit"].startswith(prefix)), key=lambda r: r["unit"])

    def ready(self, count, limit):
        """Seconds until so many ranks are ready and reported by their node; None: not within the limit."""
        begin = time.time()
        while time.time() - begin < limit:
            if sum(r["phase"] == "ready" and "incarnation" in r for r in self.ranks()) >= count:
                return time.time() - begin
            time.sleep(0.1)

    def back(self, before, limit=120):
        """Seconds until a rank is seen out of service, and until it is ready in a later epoch."""
        begin, gone = time.time(), None
        while time.time() - begin < limit:
            for r in self.ranks(before["unit"]):
                if r["phase"] != "ready" and gone is None:
                    gone = time.time() - begin
                if r["phase"] == "ready" and r["epoch"] > before["epoch"]:
                    return gone, time.time() - begin
            time.sleep(0.1)
        return gone, None

    def bench(self, model, *argv, url=None):
        argv = "bench", url or self.url, "--model", model, *argv, "-o", "json"
        code, out, err = run(DPSERVE, *argv, limit=180)
        try:
            return json.loads(out)
        except ValueError:
            say("bench ends with", code, (out + err)[-400:])
            return {}

    def killed_and_back(self, count):
        """Kills dpserve and starts it again: seconds until the ranks are ready, whether they are the same."""
        before = self.incarnations()
        self.kill()
        begin = time.time()
        self.start()
        self.ready(count, 60)
        seconds = time.time() - begin
        return seconds, before == self.incarnations()

    def incarnations(self):
        return [[r.get(k) for k in ("unit", "pid", "epoch", "incarnation")] for r in self.ranks()]


def kill_part(rank, word):
    """Kills the process of an engine whose command line has word, else the engine's first process."""
    rows = [line.split(None, 2) for line in run("ps", "-eo", "pid,ppid,args")[1].splitlines()[1:]]
    tree = {rank["pid"]}
    while more := {int(r[0]) for r in rows if int(r[1]) in tree} - tree:
        tree |= more
    found = [int(r[0]) for r in rows if int(r[0]) in tree and word in r[2]]
    os.kill((found or [rank["pid"]])[0], signal.SIGKILL)


def post(url, path, body):
    """Status, headers, answer (a dict if it is JSON), seconds."""
    at, begin = urllib.parse.urlsplit(url), time.time()
    c = http.client.HTTPConnection(at.hostname, at.port, timeout=120)
    try:
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        text, headers = r.read(), {k.lower(): v for k, v in r.getheaders()}
    except (OSError, http.client.HTTPException) as e:
        return 0, {}, repr(e), time.time() - begin
    finally:
        c.close()
    try:
        return r.status, headers, json.loads(text), time.time() - begin
    except ValueError:
        return r.status, headers, text.decode(errors="replace"), time.time() - begin


def device():
    """Name, and MiB in use, of the first GPU; None: there is none."""
    code, out, _ = run("nvidia-smi", "--query-gpu=name,memory.used", "--format=csv,noheader,nounits")
    if code or not out.strip():
        return None
    name, used = out.splitlines()[0].rsplit(",", 1)
    return name.strip(), int(used)


def empty_caches(node):
    """vLLM's ranks forget what they have cached. dpserve hears of it with each engine's next step."""
    for r in [] if SIMULATED else node.ranks():
        post(r["url"], "/reset_prefix_cache", {})


def predictions(node, model, count, path="/v1/completions", word="w"):
    """Compares what dpserve says a rank has cached with what the engine reports, on three documents."""
    words = " ".join("%s%d" % (word, i % 97) for i in range(900))
    exact, tokens, hits, others, ranks = 0, 0, 0, [], collections.Counter()
    for i in range(count):
        prompt = "doc %d %s q%d" % (i % 3, words, i)
        body = dict(model=model, prompt=prompt, max_tokens=4, temperature=0)
        if path == "/generate":
            body = dict(text=prompt, sampling_params=dict(max_new_tokens=4, temperature=0))
        status, headers, answer, _ = post(node.url, path, body)
        if status != 200:
            others.append((status, str(answer)[:200]))
            continue
        usage = answer["meta_info"] if path == "/generate" else answer["usage"]
        found = (usage.get("prompt_tokens_details") or usage).get("cached_tokens") or 0
        said = int(headers.get("x-dpserve-cached-tokens", -1))
        tokens, hits, exact = tokens + usage["prompt_tokens"], hits + found, exact + (said == found)
        ranks["%s of %s" % (headers.get("x-dpserve-rank"), headers.get("x-dpserve-group"))] += 1
        if said != found:
            others.append((i, said, found))
        time.sleep(0.1)  # so that the events of one answer are there before the next request
    record("predictions", model=model, path=path, requests=count, exact=exact, prompt=tokens, cached=hits,
           others=others[:4], ranks=ranks)
