package app

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// checkEngine runs the rules of engine. Most depend on its kind.
func (d *decoder) checkEngine(a *draft) {
	path := a.path + ".engine"
	if !d.isSound(path + ".kind") {
		return
	}
	d.checkArgs(a)
	for name := range a.Engine.Env {
		at := join(path+".env", name)
		if instead := ownedEnv(name); instead != "" && d.isGood(at) {
			d.wrong(at, "dpserve sets "+name+" itself", instead)
		}
	}
	if a.Engine.Kind == KindAttach {
		d.checkAttach(a)
		return
	}
	for _, key := range []string{"family", "ranks"} {
		if at := join(path, key); d.has(at) {
			d.wrong(at, key+" belongs to kind attach", "leave it out, or write kind: attach")
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
			d.wrong(path, "dpserve writes the flag --"+flag+" itself", instead)
			continue
		}
		if flag == flagKVTransfer && transferRole(arg.Value) {
			d.wrong(path, "kv_role for prefill or decode is not supported in this version",
				"disaggregated prefill and decode come with a later version; only kv_role kv_both works here")
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
	tp, dp := a.tensor(), a.DataParallel.DPSize
	if attention && tp > 0 && dp > 0 && (dp > tp || tp%dp != 0) {
		d.broken(a.path+".data_parallel.dp_size", Fault{
			Message: "with DP attention dp_size divides tp_size",
			Found:   fmt.Sprintf("dp_size %d, tp_size %d", dp, tp),
			Wanted:  "tp_size % dp_size = 0", Hint: "write engine.args.tp_size as a multiple of dp_size",
		})
	}
}

// parallel returns the parallel size that one of the flags sets: 1 if none does, 0 if it is not a positive
// number.
func (a *draft) parallel(flags ...string) int {
	for _, arg := range a.Engine.Args {
		if slices.Contains(flags, arg.flag()) {
			return positive(arg.Value)
		}
	}
	return 1
}

// tensor returns the tensor parallel size.
func (a *draft) tensor() int { return a.parallel("tensor-parallel-size", "tp-size", "tp") }

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
	a.Resources.GPUsSet = d.has(path + ".gpus")
	switch a.Engine.Kind {
	case KindAttach:
		for _, key := range []string{"gpus", "cpus", "memory_gib"} {
			if at := join(path, key); d.isSound(at) {
				d.wrong(at, "an attached rank takes nothing of a node", "leave "+key+" out")
			}
		}
	case KindSim:
	case KindVLLM, KindSGLang:
		d.settleGPUs(a, path+".gpus")
	}
}

func (d *decoder) settleGPUs(a *draft, path string) {
	tp, pp := a.tensor(), a.parallel("pipeline-parallel-size", "pp-size", "pp")
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

// ruleSize is in every fault about sizes, because in Ray's history num_replicas has meant both ranks and
// groups.
const ruleSize = "num_replicas = dp_size × num_groups"

// settleSizes fills in dp_size, num_groups and num_replicas, and refuses sizes that do not multiply. Each may
// be missing.
func (d *decoder) settleSizes(a *draft) {
	replicas, groups, dp := a.path+".num_replicas", a.path+".num_groups", a.path+".data_parallel.dp_size"
	if !d.isGood(replicas, groups, dp, a.path+".autoscaling_config") || !d.takeScaling(a) {
		return
	}
	if a.Engine.Kind == KindAttach && !d.sizeByRanks(a) {
		return
	}
	if a.DataParallel.DPSize == 0 {
		a.DataParallel.DPSize = 1
	}
	if a.NumGroups == 0 && !d.groupsByReplicas(a) {
		return
	}
	product := a.DataParallel.DPSize * a.NumGroups
	if a.NumReplicas == 0 {
		a.NumReplicas = product
	}
	if a.NumReplicas != product {
		d.broken(replicas, Fault{
			Message: ruleSize, Found: strconv.Itoa(a.NumReplicas),
			Wanted: fmt.Sprintf("%d × %d = %d", a.DataParallel.DPSize, a.NumGroups, product),
			Hint:   "leave num_replicas or num_groups out",
		})
	}
	if product > MaxRanks {
		d.broken(groups, Fault{
			Message: ruleSize, Found: fmt.Sprintf("%d ranks", product),
			Wanted: fmt.Sprintf("at most %d", MaxRanks),
		})
	}
}

// groupsByReplicas derives num_groups; false after a fault.
func (d *decoder) groupsByReplicas(a *draft) bool {
	size, replicas := a.DataParallel.DPSize, a.NumReplicas
	if replicas == 0 {
		replicas = size
	}
	if replicas%size == 0 {
		a.NumGroups = replicas / size
		return true
	}
	next := (replicas/size + 1) * size
	hint := fmt.Sprintf("write %d", next)
	if replicas > size {
		hint = fmt.Sprintf("write %d or %d", next-size, next)
	}
	d.broken(a.path+".num_replicas", Fault{
		Message: ruleSize, Found: strconv.Itoa(replicas),
		Wanted: fmt.Sprintf("a multiple of dp_size %d", size), Hint: hint,
	})
	return false
}

// takeScaling reads autoscaling_config as a fixed size; false after a fault.
func (d *decoder) takeScaling(a *draft) bool {
	path := a.path + ".autoscaling_config"
	if !d.has(path) {
		return true
	}
	s := a.Scaling
	if s.Minimum == 0 || s.Minimum != s.Maximum || s.Initial != 0 && s.Initial != s.Minimum {
		d.broken(path, Fault{
			Message: "the number of ranks is fixed",
			Found:   fmt.Sprintf("min_replicas %d, max_replicas %d", s.Minimum, s.Maximum),
			Wanted:  "min_replicas = max_replicas", Hint: "write num_replicas instead",
		})
		return false
	}
	if a.NumReplicas != 0 && a.NumReplicas != s.Minimum {
		d.broken(path, Fault{
			Message: "two sizes", Found: fmt.Sprintf("num_replicas %d and min_replicas %d", a.NumReplicas,
				s.Minimum),
			Wanted: "one of them", Hint: "leave autoscaling_config out",
		})
		return false
	}
	d.warn(path, fmt.Sprintf("read as num_replicas: %d", s.Minimum), "write num_replicas instead")
	a.NumReplicas = s.Minimum
	return true
}

// sizeByRanks sets dp_size and num_groups of an attach application from its list of ranks; false after a
// fault.
func (d *decoder) sizeByRanks(a *draft) bool {
	path := a.path + ".engine.ranks"
	if len(a.Engine.Ranks) == 0 || !d.isGood(path) {
		return false
	}
	for i := range a.Engine.Ranks {
		if !d.isGood(index(path, i) + ".group") {
			return false
		}
	}
	sizes, ok := d.groupSizes(a)
	if !ok {
		return false
	}
	dp, groups := &a.DataParallel.DPSize, &a.NumGroups
	if *dp != 0 && *dp != sizes[0] {
		d.broken(a.path+".data_parallel.dp_size", Fault{
			Message: "dp_size is the number of attached ranks of a group", Found: strconv.Itoa(*dp),
			Wanted: strconv.Itoa(sizes[0]),
			Hint:   "leave dp_size out, or list the missing ranks",
		})
		return false
	}
	if *groups != 0 && *groups != len(sizes) {
		d.broken(a.path+".num_groups", Fault{
			Message: "num_groups is the number of groups that the ranks name", Found: strconv.Itoa(*groups),
			Wanted: strconv.Itoa(len(sizes)),
			Hint:   "write group: N on each rank, from 0",
		})
		return false
	}
	*dp, *groups = sizes[0], len(sizes)
	return true
}

// groupSizes counts the ranks of each group. Groups must be numbered from 0 without gaps and have one size.
func (d *decoder) groupSizes(a *draft) ([]int, bool) {
	sizes := make([]int, len(a.Engine.Ranks))
	top := 0
	for i, r := range a.Engine.Ranks {
		if r.Group >= len(sizes) {
			d.unlike(index(a.path+".engine.ranks", i)+".group", strconv.Itoa(r.Group),
				"group numbers from 0 without gaps", "count groups from 0")
			return nil, false
		}
		sizes[r.Group]++
		top = max(top, r.Group)
	}
	sizes = sizes[:top+1]
	for g, n := range sizes {
		if n != sizes[0] || n == 0 {
			d.broken(a.path+".engine.ranks", Fault{
				Message: "all groups have the same number of ranks",
				Found:   fmt.Sprintf("group %d with %d", g, n),
				Wanted:  fmt.Sprintf("%d as in group 0", sizes[0]),
				Hint:    "check the group numbers of the ranks, counted from 0",
			})
			return nil, false
		}
	}
	if sizes[0] > MaxDPSize {
		d.unlike(a.path+".engine.ranks", fmt.Sprintf("%d ranks in a group", sizes[0]),
			fmt.Sprintf("at most %d", MaxDPSize), "form groups with group: N")
		return nil, false
	}
	return sizes, true
}

// flagKVTransfer is the flag whose kv_role decides whether an engine does only prefill or only decode.
const flagKVTransfer = "kv-transfer-config"

// ownedFlag says what to write instead of a flag that dpserve sets; "" if the user may set it. flag is in
// kebab case without leading dashes.
func ownedFlag(flag string) string {
	const (
		rank = "dpserve hands out ranks and addresses; write data_parallel.dp_size and " +
			"data_parallel.coupling"
		size   = "write data_parallel.dp_size"
		names  = "write model.id and model.aliases"
		source = "write model.source"
		lora   = "write model.adapters"
		pd     = "disaggregated prefill and decode come with a later version"
		spread = "dpserve places the ranks; write resources and placement_group_strategy"
		always = "it is always set; leave it out"
	)
	flag, _, _ = strings.Cut(flag, ".") // one key of a flag that takes JSON
	switch flag {
	case "host":
		return "dpserve binds engines to 127.0.0.1; where clients connect is set on the node (--http-bind)"
	case "port":
		return "dpserve takes ports from the node's --port-range"
	case "served-model-name":
		return names
	case "model", "model-path":
		return source
	case "lora-modules", "lora-paths":
		return lora
	case "data-parallel-size", "dp-size", "dp":
		return size
	case "dpn", "dpl", "dpa", "dpp", "dpe", "dph", "dpm", "dpb", "dpr":
		return rank
	case "nnodes", "node-rank", "dist-init-addr", "master-addr", "master-port", "headless":
		return spread
	case "kv-events-config":
		return "write engine.kv_events: auto | off"
	case "disaggregation-mode", "disaggregation-bootstrap-port":
		return pd
	case "shutdown-timeout":
		return "write graceful_shutdown_timeout_s"
	case "enable-prompt-tokens-details", "sim-watch-stdin":
		return always
	}
	if strings.HasPrefix(flag, "data-parallel-") {
		return rank
	}
	return ""
}

// ownedEnv is ownedFlag for environment variables.
func ownedEnv(name string) string {
	switch name {
	case "CUDA_VISIBLE_DEVICES":
		return "write resources.gpus; dpserve picks the devices"
	case "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT":
		return "write data_parallel.dp_size; dpserve hands out the ranks"
	case "VLLM_HTTP_TIMEOUT_KEEP_ALIVE":
		return "leave it out; it must outlive dpserve's idle connections"
	}
	return ""
}

// settleNumbers checks written rank numbers, and drops those that equal the rank's position.
func (d *decoder) settleNumbers(a *draft) {
	path := a.path + ".engine.ranks"
	if a.Engine.Kind != KindAttach || !d.isGood(path, a.path+".data_parallel.coupling") {
		return
	}
	numbers, by, ok := a.Engine.numbers(), map[[2]int]string{}, true
	for i := range a.Engine.Ranks {
		at, group := index(path, i), a.Engine.Ranks[i].Group
		if !d.isGood(at+".rank", at+".group") {
			ok = false
			continue
		}
		ok = d.checkNumber(a, at, numbers[i], by[[2]int{group, numbers[i]}]) && ok
		by[[2]int{group, numbers[i]}] = at
	}
	if ok {
		a.Engine.setNumbers(numbers)
	}
}

// checkNumber checks the number of one rank. first is the path of another rank with this number, "" if there
// is none.
func (d *decoder) checkNumber(a *draft, path string, number int, first string) bool {
	switch {
	case d.has(path+".rank") && a.DataParallel.Coupling == Lockstep:
		d.wrong(path+".rank", "the ranks of a lockstep group are numbered in the order of the file",
			"leave rank out")
	case first != "":
		d.wrong(path+".rank", "rank "+strconv.Itoa(number)+" of the group is taken by "+first,
			"choose another number; a rank without one has its place in the file as number")
	default:
		return true
	}
	return false
}
