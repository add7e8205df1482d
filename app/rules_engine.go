package app

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// checkEngine runs the rules of engine. Most depend on its kind.
func (d *decoder) checkEngine(a *draft) {
	path := a.path + ".engine"
	if !d.need(a.path, "engine", "write engine: {kind: sim}") ||
		!d.need(path, "kind", "write kind: sim for the simulated engine") {
		return
	}
	for i, word := range a.Engine.Command {
		if word == "" && d.isGood(index(path+".command", i)) {
			d.broken(index(path+".command", i), Fault{Found: `""`, Wanted: "a word of the command"})
		}
	}
	d.checkArgs(a)
	d.checkEnv(a)
	if a.Engine.Kind == KindAttach {
		d.checkAttach(a)
		return
	}
	d.onlyFor(KindAttach, path, "family", "ranks")
}

// onlyFor records faults for keys that only one kind has.
func (d *decoder) onlyFor(kind Kind, around string, keys ...string) {
	for _, key := range keys {
		if path := join(around, key); d.has(path) {
			d.broken(path, Fault{Message: key + " belongs to kind " + string(kind),
				Hint: "leave it out, or write kind: " + string(kind)})
		}
	}
}

// checkArgs refuses flags that dpserve sets, and flags that are written twice.
func (d *decoder) checkArgs(a *draft) {
	seen := taken{}
	for _, arg := range a.Engine.Args {
		path := join(a.path+".engine.args", arg.Name)
		if !d.isGood(path) {
			continue
		}
		flag := arg.flag()
		if instead := ownedFlag(flag); instead != "" {
			d.broken(path, Fault{Message: "dpserve writes the flag --" + flag + " itself", Hint: instead})
			continue
		}
		if flag == flagKVTransfer && transferRole(arg.Value) {
			d.broken(path, Fault{
				Message: "kv_role for prefill or decode is not supported in this version",
				Hint: "disaggregated prefill and decode come with a later version; only kv_role kv_both " +
					"works here",
			})
			continue
		}
		d.claim(seen, path, "flag", "--"+flag)
	}
}

// transferRole reports whether a KV transfer configuration makes the engine do only prefill or only decode.
func transferRole(v any) bool {
	config, ok := v.(map[string]any)
	if text, isText := v.(string); isText {
		ok = json.Unmarshal([]byte(text), &config) == nil
	}
	role, written := config["kv_role"]
	return ok && written && role != "kv_both"
}

func (d *decoder) checkEnv(a *draft) {
	for name := range a.Engine.Env {
		path := join(a.path+".engine.env", name)
		if instead := ownedEnv(name); instead != "" && d.isGood(path) {
			d.broken(path, Fault{Message: "dpserve sets " + name + " itself", Hint: instead})
		}
	}
}

// settleCoupling fills in the coupling if the kind decides it, and demands it otherwise.
func (d *decoder) settleCoupling(a *draft) {
	path := a.path + ".data_parallel.coupling"
	if !d.isGood(path, a.path+".engine.kind") {
		return
	}
	written := d.has(path)
	switch {
	case a.Engine.Kind == KindSGLang:
		d.settleSGLang(a, path, written)
	case written:
	case a.Engine.Kind == KindVLLM && a.DataParallel.DPSize > 1:
		d.broken(path, Fault{
			Message: "coupling is required for kind vllm when dp_size is above 1",
			Wanted:  string(Independent) + " | " + string(Lockstep),
			Hint: "independent for dense models, lockstep for expert parallelism: dpserve does not read " +
				"model configurations",
		})
	default:
		a.DataParallel.Coupling = Independent
	}
}

// settleSGLang checks that DP attention and lockstep go together, and that tp_size is a multiple of dp_size.
func (d *decoder) settleSGLang(a *draft, path string, written bool) {
	attention := a.Engine.Args.isOn("enable-dp-attention")
	implied := Independent
	if attention {
		implied = Lockstep
	}
	if written && a.DataParallel.Coupling != implied {
		d.broken(path, Fault{
			Message: "for kind sglang, coupling: lockstep and args.enable_dp_attention: true go together",
			Found:   string(a.DataParallel.Coupling), Wanted: string(implied),
			Hint: "leave coupling out, or change enable_dp_attention",
		})
		return
	}
	a.DataParallel.Coupling = implied
	tp, dp := a.parallel(tensorFlags()), a.DataParallel.DPSize
	if attention && tp > 0 && dp > 0 && (dp > tp || tp%dp != 0) {
		d.broken(a.path+".data_parallel.dp_size", Fault{
			Message: "with DP attention dp_size divides tp_size",
			Found:   fmt.Sprintf("dp_size %d, tp_size %d", dp, tp),
			Wanted:  "tp_size % dp_size = 0", Hint: "write engine.args.tp_size as a multiple of dp_size",
		})
	}
}

func tensorFlags() []string { return []string{"tensor-parallel-size", "tp-size", "tp"} }

func pipelineFlags() []string { return []string{"pipeline-parallel-size", "pp-size", "pp"} }

// parallel returns the parallel size that one of the flags sets: 1 if none does, 0 if it is not a positive
// number.
func (a *draft) parallel(flags []string) int {
	for _, arg := range a.Engine.Args {
		for _, flag := range flags {
			if arg.flag() == flag {
				return positive(arg.Value)
			}
		}
	}
	return 1
}

func positive(v any) int {
	n, ok := v.(int64)
	if text, isText := v.(string); isText {
		parsed, err := strconv.ParseInt(text, 10, 64)
		n, ok = parsed, err == nil
	}
	if !ok || n < 1 || n > maxParallel {
		return 0
	}
	return int(n)
}

// maxParallel bounds tensor and pipeline parallel sizes.
const maxParallel = 1_024

// settleResources derives the devices of one rank from its engine's arguments.
func (d *decoder) settleResources(a *draft) {
	path := a.path + ".resources"
	switch a.Engine.Kind {
	case KindAttach:
		for _, key := range []string{"gpus", "cpus", "memory_gib"} {
			if at := join(path, key); d.has(at) && d.isGood(at) {
				d.broken(at, Fault{Message: "an attached rank takes nothing of a node",
					Hint: "leave " + key + " out"})
			}
		}
	case KindSim:
	case KindVLLM, KindSGLang:
		d.settleGPUs(a, path+".gpus")
	}
}

func (d *decoder) settleGPUs(a *draft, path string) {
	tp, pp := a.parallel(tensorFlags()), a.parallel(pipelineFlags())
	if tp == 0 || pp == 0 {
		if d.isGood(a.path + ".engine.args") {
			d.broken(a.path+".engine.args", Fault{
				Message: "tensor and pipeline parallel sizes count devices",
				Wanted:  fmt.Sprintf("integers from 1 to %d", maxParallel),
			})
		}
		return
	}
	need := tp * pp
	if a.Engine.Kind == KindSGLang && a.DataParallel.Coupling == Lockstep && a.DataParallel.DPSize > 0 {
		need = max(1, need/a.DataParallel.DPSize)
	}
	if !a.Resources.GPUsSet {
		a.Resources.GPUs = need
		return
	}
	if a.Resources.GPUs != 0 && a.Resources.GPUs != need && d.isGood(path) {
		d.warn(path, fmt.Sprintf("the engine's parallel sizes use %d devices per rank, the file gives %d",
			need, a.Resources.GPUs),
			"leave gpus out to give what the engine uses")
	}
}
