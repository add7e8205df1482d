package app

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing"
)

// draft is an application, or one of its pools, during parsing. Its methods are the rules of one application;
// they name keys relative to the application.
type draft struct {
	Application
	// accepted with `min_replicas` = `max_replicas`, and then means `num_replicas`
	Scaling scaling `json:"autoscaling_config"`
	// ranks that only compute prompts. Stands together with `decode`
	Prefill side `json:"prefill" unset:"no prefill ranks"`
	// ranks that compute answers, and prompts that do not go to a prefill rank
	Decode side `json:"decode" unset:"no prefill ranks"`

	path   string
	whole  string // of a pool: the path of its application
	places []int  // of a pool: the index of each attached rank in the file
	d      *decoder
}

// at returns the path of a key. The keys of a pool are its own if it has them, else those of its application.
func (a *draft) at(key string) string {
	own := a.path + "." + key
	if a.whole == "" || a.d.has(own) {
		return own
	}
	if shared := a.whole + "." + key; a.d.has(shared) || a.d.bad[shared] {
		return shared
	}
	return own
}

func (a *draft) rankKey(i int) string {
	if a.whole != "" {
		i = a.places[i]
	}
	return index("engine.ranks", i)
}

func (a *draft) has(key string) bool { return a.d.has(a.at(key)) }

func (a *draft) isSound(key string) bool { return a.d.isSound(a.at(key)) }

func (a *draft) isGood(keys ...string) bool {
	return !slices.ContainsFunc(keys, func(key string) bool { return !a.d.isGood(a.at(key)) })
}

// wrong records a broken rule and returns false.
func (a *draft) wrong(key, message, hint string) bool { return a.refuse(key, message, "", "", hint) }

// refuse records a broken rule and returns false.
func (a *draft) refuse(key, message, found, wanted, hint string) bool {
	a.d.broken(a.at(key), Fault{Message: message, Found: found, Wanted: wanted, Hint: hint})
	return false
}

// check runs the rules and fills in the defaults that depend on other keys.
func (a *draft) check() {
	if !a.has("model.source") {
		a.Model.Source = a.Model.ID
	} else if a.Model.Source == "" && a.isSound("model.source") {
		a.refuse("model.source", "", `""`, "what the engine loads: a repository or a path",
			"leave it out to use the id")
	}
	if a.isSound("engine.kind") {
		a.checkEngine()
	}
	a.settleSizes()
	a.settleCoupling()
	a.settlePolicy()
	a.settleNumbers()
	settleResources(a)
	if a.PlacementGroupStrategy == "" {
		a.PlacementGroupStrategy = DefaultStrategy(&a.Application)
	}
	a.checkKeepalive()
	_, err := a.Routing.NewPolicy()
	a.judge("routing.params", err)
	if a.Disaggregation != nil {
		_, err := routing.ParsePairRule(a.Disaggregation.Decide)
		a.judge("disaggregation.decide", err)
	}
}

// leastKeepalive bounds the comments that a client may get, in seconds between two.
const leastKeepalive = 1

func (a *draft) checkKeepalive() {
	const key = "timeouts.keepalive_s"
	if s := a.Timeouts.KeepaliveS; a.isGood(key) && s > 0 && s < leastKeepalive {
		a.refuse(key, "", strconv.FormatFloat(s, 'g', -1, 64), "0, or seconds from 1 to 2592000",
			"0 turns it off")
	}
}

// judge makes a fault of what package routing says of a key, with hint and details of a *problem.Error.
func (a *draft) judge(key string, err error) {
	if err == nil || !a.isGood(key) {
		return
	}
	message, hint := err.Error(), ""
	if p, ok := errors.AsType[*problem.Error](err); ok {
		hint = p.Hint
		if len(p.Details) > 1 { // a single detail repeats the message
			message += ": " + strings.Join(p.Details, "; ")
		}
	}
	a.wrong(key, message, hint)
}

// claims are what applications must not share.
type claims struct{ names, models, servers taken }

// claim refuses names and addresses that an earlier application has. A prefill pool has no names of its own.
func (a *draft) claim(by claims) {
	a.claimServers(by)
	if a.Pool == PoolPrefill {
		return
	}
	a.d.claim(by.names, a.at("name"), "application name", a.Name)
	a.d.claim(by.models, a.at("model.id"), "model name", a.Model.ID)
	for i, alias := range a.Model.Aliases {
		a.d.claim(by.models, index(a.at("model.aliases"), i), "model name", alias)
	}
	for i, adapter := range a.Model.Adapters {
		at := index(a.at("model.adapters"), i) + ".id"
		a.d.claim(by.models, at, "model name", adapter.ID)
		if adapter.ID != "" && a.Model.ID != "" {
			a.d.claim(by.models, at, "model name", a.Model.ID+":"+adapter.ID)
		}
	}
}

// claimServers warns about engines that an earlier application attaches too.
func (a *draft) claimServers(by claims) {
	mine := cmp.Or(a.whole, a.path)
	for i, r := range a.Engine.Ranks {
		first, ok := by.servers[r.URL]
		if !ok {
			by.servers[r.URL] = mine
		} else if r.URL != "" && first != mine {
			a.d.warn(a.at(a.rankKey(i))+".url", "the engine is attached by "+first+" too",
				"each application counts only its own load there")
		}
	}
}

// checkEngine runs the rules of engine. Most depend on its kind.
func (a *draft) checkEngine() {
	a.checkArgs()
	for name := range a.Engine.Env {
		at := a.at(join("engine.env", name))
		if instead := ownedEnv(name); instead != "" && a.d.isGood(at) {
			a.d.wrong(at, "dpserve sets "+name+" itself", instead)
		}
	}
	if a.Engine.Kind == KindAttach {
		a.checkNothingStarts()
		if a.whole == "" {
			a.checkAttachedRanks("")
		}
		return
	}
	for _, key := range []string{"family", "ranks", "services", "api_key_env", "api_key_file", "tls"} {
		if a.has("engine." + key) {
			a.wrong("engine."+key, key+" belongs to kind attach", "leave it out, or write kind: attach")
		}
	}
}

// checkNothingStarts refuses keys about starting engines of kind attach: dpserve starts none of them.
func (a *draft) checkNothingStarts() {
	for _, key := range []string{"command", "args", "env"} {
		if a.has("engine." + key) {
			a.wrong("engine."+key, key+" is for engines that dpserve starts, not for kind attach",
				"leave it out")
		}
	}
	if a.has("engine.api_key_env") && a.has("engine.api_key_file") {
		a.wrong("engine.api_key_file", "the key comes from api_key_env already", "leave one of the two out")
	}
}

// checkAttachedRanks runs the rules of engine.ranks: every engine needs an exact address. transfer is "" if
// the application has one pool.
func (a *draft) checkAttachedRanks(transfer string) {
	if a.checkServices(transfer); !a.has("engine.services") {
		a.d.need(a.at("engine"), "ranks", "write ranks: [{url: \"http://127.0.0.1:8100\"}]")
	}
	if len(a.Engine.Ranks) == 0 && a.isSound("engine.ranks") {
		a.refuse("engine.ranks", "", "an empty list", "at least one rank",
			`write {url: "http://127.0.0.1:8100"}`)
	}
	addresses := taken{}
	for i := range a.Engine.Ranks {
		at := a.at(a.rankKey(i))
		a.d.checkRank(a.Engine.Family, &a.Engine.Ranks[i], at, addresses)
		checkPD(a.d, transfer, &a.Engine.Ranks[i], at, addresses)
	}
}

// checkArgs refuses flags that dpserve owns, and flags that are written twice.
func (a *draft) checkArgs() {
	seen := taken{}
	for _, arg := range a.Engine.Args {
		path, flag := a.at(join("engine.args", arg.Name)), arg.flag()
		if !a.d.isGood(path) {
			continue
		}
		owned, isOwned := engineflags.FindOwned(flag)
		if isOwned && (!owned.OnlyOn || arg.Value == false) {
			a.d.wrong(path, cmp.Or(owned.Why, "dpserve writes the flag --"+flag+" itself"), owned.InFile)
			continue
		}
		if key, ok := transferKey(flag); ok {
			checkTransferConfig(a, path, key, arg.Value)
		}
		if !a.d.isGood(path) {
			continue
		}
		a.claimSetting(seen, path, flag)
		switch {
		case !a.d.isGood(path):
		case a.Engine.Kind == KindSim:
			a.checkSim(arg, path)
		default:
			a.checkReal(arg, path)
		}
	}
}

// claimSetting refuses a flag if an earlier one sets the same.
func (a *draft) claimSetting(seen taken, path, flag string) {
	a.d.claim(seen, path, "flag", "--"+flag)
	setting := a.Engine.Kind.settingOf(flag)
	switch first, ok := seen[setting]; {
	case !ok:
		seen[setting] = path
	case a.d.isGood(path):
		a.d.wrong(path, "--"+flag+" sets the same as "+first, "leave one of them out")
	}
}

// settleCoupling fills in the coupling if the kind decides it, and demands it otherwise.
func (a *draft) settleCoupling() {
	const key = "data_parallel.coupling"
	if !a.isGood(key, "engine.kind") {
		return
	}
	switch {
	case a.Engine.Kind == KindSGLang:
		a.settleSGLang(key)
	case a.has(key):
	case a.Engine.Kind == KindVLLM && a.DataParallel.DPSize > 1:
		a.refuse(key, "coupling is required for kind vllm when dp_size is above 1", "",
			"independent | lockstep", "independent for dense models, lockstep for expert parallelism: "+
				"dpserve does not read model configurations")
	default:
		a.DataParallel.Coupling = Independent
	}
}

// settlePolicy fills in the policy, and says where it does not fit the coupling.
func (a *draft) settlePolicy() {
	const key = "routing.policy"
	policy, isLockstep := a.Routing.Policy, a.DataParallel.Coupling == Lockstep
	forGroups := DefaultPolicy(Lockstep)
	if policy == "" {
		a.Routing.Policy = DefaultPolicy(a.DataParallel.Coupling)
		return
	}
	if !a.isGood(key, "data_parallel.coupling") {
		return
	}
	hint := "leave policy out for " + forGroups + ", the default of lockstep groups"
	switch fit := routing.GroupFitOf(policy); {
	case !isLockstep && fit == routing.ForGroupsOnly:
		a.d.warn(a.at(key), policy+" holds requests of lockstep groups only: independent ranks get "+
			"lmetric-1",
			"leave policy out for "+DefaultPolicy(Independent)+", the default of independent ranks")
	case isLockstep && fit == routing.WrongForGroups:
		a.wrong(key, policy+" takes the cost of a prompt for that of one rank. The ranks of a lockstep "+
			"group step together, and "+policy+" costs such a group a quarter of its tokens", hint)
	case isLockstep && fit == routing.SlowForGroups:
		a.d.warn(a.at(key), policy+" sends each prompt by itself, so that one rank's prompt makes the step "+
			"of every rank of the lockstep group long; "+forGroups+" lets prompts share steps", hint)
	}
}

// settleSGLang checks that DP attention and lockstep go together, and that tp_size is a multiple of dp_size.
func (a *draft) settleSGLang(key string) {
	attention, implied := a.Engine.Args.isOn("enable-dp-attention"), Independent
	if attention {
		implied = Lockstep
	}
	if a.has(key) && a.DataParallel.Coupling != implied {
		a.refuse(key, "for kind sglang, coupling: lockstep and args.enable_dp_attention: true go together",
			string(a.DataParallel.Coupling), string(implied),
			"leave coupling out, or change enable_dp_attention")
		return
	}
	a.DataParallel.Coupling = implied
	tp, dp := a.tensor(), a.DataParallel.DPSize
	if attention && tp > 0 && dp > 0 && (dp > tp || tp%dp != 0) {
		a.refuse("data_parallel.dp_size", "with DP attention dp_size divides tp_size",
			fmt.Sprintf("dp_size %d, tp_size %d", dp, tp), "tp_size % dp_size = 0",
			"write engine.args.tp_size as a multiple of dp_size")
	}
}

func (a *draft) tensor() int { return a.parallel("tensor-parallel-size", "tp-size", "tp") }

// parallel returns the parallel size that one of the flags sets: 1 if none does, 0 if it is not from 1 to
// maxParallel.
func (a *draft) parallel(flags ...string) int {
	i := slices.IndexFunc(a.Engine.Args, func(arg Arg) bool { return slices.Contains(flags, arg.flag()) })
	if i < 0 {
		return 1
	}
	n, _ := a.Engine.Args[i].Value.(int64)
	if text, isText := a.Engine.Args[i].Value.(string); isText {
		n, _ = strconv.ParseInt(text, 10, 64) // 0 or too large after an error
	}
	if n < 1 || n > maxParallel {
		return 0
	}
	return int(n)
}

// maxParallel bounds tensor and pipeline parallel sizes.
const maxParallel = 1_024

// ruleSize is in every fault about sizes, because in Ray's history num_replicas has meant both ranks and
// groups.
const ruleSize = "num_replicas = dp_size × num_groups"

// settleSizes fills in dp_size, num_groups and num_replicas, and refuses sizes that do not multiply. Each may
// be missing.
func (a *draft) settleSizes() {
	if !a.isGood("num_replicas", "num_groups", "data_parallel.dp_size", "autoscaling_config") ||
		!a.takeScaling() || a.Engine.Kind == KindAttach && !a.sizeByRanks() {
		return
	}
	if a.DataParallel.DPSize == 0 {
		a.DataParallel.DPSize = 1
	}
	if a.NumGroups == 0 && !a.groupsByReplicas() {
		return
	}
	product := a.DataParallel.DPSize * a.NumGroups
	if a.NumReplicas == 0 {
		a.NumReplicas = product
	}
	if a.NumReplicas != product {
		a.refuse("num_replicas", ruleSize, strconv.Itoa(a.NumReplicas),
			fmt.Sprintf("%d × %d = %d", a.DataParallel.DPSize, a.NumGroups, product),
			"leave num_replicas or num_groups out")
	}
	if product > MaxRanks {
		a.refuse("num_groups", ruleSize, fmt.Sprintf("%d ranks", product),
			fmt.Sprintf("at most %d", MaxRanks), "")
	}
}

// groupsByReplicas derives num_groups; false after a fault.
func (a *draft) groupsByReplicas() bool {
	size, replicas := a.DataParallel.DPSize, a.NumReplicas
	if replicas == 0 {
		replicas = size
	}
	if a.NumGroups = replicas / size; replicas%size == 0 {
		return true
	}
	hint := fmt.Sprintf("write %d", (a.NumGroups+1)*size)
	if replicas > size {
		hint = fmt.Sprintf("write %d or %d", a.NumGroups*size, (a.NumGroups+1)*size)
	}
	return a.refuse("num_replicas", ruleSize, strconv.Itoa(replicas),
		fmt.Sprintf("a multiple of dp_size %d", size), hint)
}

// takeScaling reads autoscaling_config as a fixed size; false after a fault.
func (a *draft) takeScaling() bool {
	const key = "autoscaling_config"
	s := a.Scaling
	switch {
	case !a.has(key):
		return true
	case s.Minimum == 0 || s.Minimum != s.Maximum || s.Initial != 0 && s.Initial != s.Minimum:
		return a.refuse(key, "the number of ranks is fixed",
			fmt.Sprintf("min_replicas %d, max_replicas %d", s.Minimum, s.Maximum),
			"min_replicas = max_replicas", "write num_replicas instead")
	case a.NumReplicas != 0 && a.NumReplicas != s.Minimum:
		return a.refuse(key, "two sizes",
			fmt.Sprintf("num_replicas %d and min_replicas %d", a.NumReplicas, s.Minimum),
			"one of them", "leave autoscaling_config out")
	}
	a.d.warn(a.at(key), fmt.Sprintf("read as num_replicas: %d", s.Minimum), "write num_replicas instead")
	a.NumReplicas = s.Minimum
	return true
}

// sizeByRanks sets dp_size and num_groups of an attach application from its list of ranks; false after a
// fault.
func (a *draft) sizeByRanks() bool {
	if len(a.Engine.Ranks) == 0 || !a.isGood("engine.ranks") {
		return a.checkEmptyPool()
	}
	for i := range a.Engine.Ranks {
		if !a.isGood(a.rankKey(i) + ".group") {
			return false
		}
	}
	sizes, ok := a.groupSizes()
	if !ok {
		return false
	}
	dp, groups := &a.DataParallel.DPSize, &a.NumGroups
	if *dp != 0 && *dp != sizes[0] {
		return a.refuse("data_parallel.dp_size", "dp_size is the number of attached ranks of a group",
			strconv.Itoa(*dp), strconv.Itoa(sizes[0]), "leave dp_size out, or list the missing ranks")
	}
	if *groups != 0 && *groups != len(sizes) {
		return a.refuse("num_groups", "num_groups is the number of groups that the ranks name",
			strconv.Itoa(*groups), strconv.Itoa(len(sizes)), "write group: N on each rank, from 0")
	}
	*dp, *groups = sizes[0], len(sizes)
	return true
}

// checkEmptyPool refuses sizes of a pool without attached ranks, and returns false.
func (a *draft) checkEmptyPool() bool {
	for _, key := range []string{"data_parallel.dp_size", "num_replicas", "num_groups"} {
		if a.Pool != "" && a.isSound(key) {
			a.wrong(key, "no attached rank has role: "+a.Pool,
				"leave it out: the ranks of each role are counted")
		}
	}
	return false
}

// groupSizes counts the ranks of each group. Groups must be numbered from 0 without gaps and have one size.
func (a *draft) groupSizes() ([]int, bool) {
	const key = "engine.ranks"
	sizes, top := make([]int, len(a.Engine.Ranks)), 0
	for i, r := range a.Engine.Ranks {
		if r.Group >= len(sizes) {
			return nil, a.refuse(a.rankKey(i)+".group", "", strconv.Itoa(r.Group),
				"group numbers from 0 without gaps", "count groups from 0")
		}
		sizes[r.Group]++
		top = max(top, r.Group)
	}
	sizes = sizes[:top+1]
	for g, n := range sizes {
		if n != sizes[0] || n == 0 {
			return nil, a.refuse(key, "all groups have the same number of ranks",
				fmt.Sprintf("group %d with %d", g, n), fmt.Sprintf("%d as in group 0", sizes[0]),
				"check the group numbers of the ranks, counted from 0")
		}
	}
	if sizes[0] > MaxDPSize {
		return nil, a.refuse(key, "", fmt.Sprintf("%d ranks in a group", sizes[0]),
			fmt.Sprintf("at most %d", MaxDPSize), "form groups with group: N")
	}
	return sizes, true
}

// settleNumbers checks written rank numbers, and drops those that equal the rank's position.
func (a *draft) settleNumbers() {
	if a.Engine.Kind != KindAttach || !a.isGood("engine.ranks", "data_parallel.coupling") {
		return
	}
	type place struct{ group, number int }
	numbers, by, ok := a.Engine.numbers(), map[place]string{}, true
	for i := range a.Engine.Ranks {
		at, is := a.rankKey(i), place{a.Engine.Ranks[i].Group, numbers[i]}
		if !a.isGood(at+".rank", at+".group") {
			ok = false
			continue
		}
		ok = a.checkNumber(at+".rank", is.number, by[is]) && ok
		by[is] = a.at(at)
	}
	if ok {
		a.Engine.setNumbers(numbers)
	}
}

// checkNumber checks the number of one rank. first is the path of another rank with this number, "" if there
// is none.
func (a *draft) checkNumber(key string, number int, first string) bool {
	if a.has(key) && a.DataParallel.Coupling == Lockstep {
		return a.wrong(key, "the ranks of a lockstep group are numbered in the order of the file",
			"leave rank out")
	}
	return first == "" || a.wrong(key, fmt.Sprintf("rank %d of the group is taken by %s", number, first),
		"choose another number; a rank without one has its place in the file as number")
}
