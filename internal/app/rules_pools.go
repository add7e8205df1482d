package app

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// side is what one pool of an application has for itself, `prefill:` or `decode:`. All other values are those
// of the application.
type side struct {
	// as of the application: `args` are merged by flag, `env` by variable. `kind`, `family`, `ranks`
	// and `services` are the application's
	Engine Engine `json:"engine"`
	// shape of the pool's groups
	DataParallel DataParallel `json:"data_parallel"`
	// ranks of the pool
	NumReplicas int `json:"num_replicas" is:"an integer from 1 to 65536" unset:"dp_size × num_groups"`
	// whole groups of the pool
	NumGroups int `json:"num_groups" is:"an integer from 1 to 65536" unset:"num_replicas / dp_size, else 1"`
	// as of the application; `labels` are merged by label
	Resources Resources `json:"resources"`
	// of the ranks of each group of the pool; left out as of an application
	PlacementGroupStrategy string `json:"placement_group_strategy" words:"strategy" unset:"by coupling"`
	// upper bound of a group's ranks on one node
	MaxRanksPerNode int `json:"max_ranks_per_node,omitempty" is:"an integer from 1 to 1024"`
	// as of the application; a pool with its own `policy` does not take over `params`
	Routing Routing `json:"routing"`
	// requests in hand per rank of the pool
	MaxOngoingRequests int `json:"max_ongoing_requests,omitempty" is:"an integer from 1 to 1000000"`

	written *cursor // nil if the side is not written, or is no map
}

func sideOf(a *Application) side {
	return side{
		Engine: a.Engine, DataParallel: a.DataParallel, NumReplicas: a.NumReplicas, NumGroups: a.NumGroups,
		Resources: a.Resources, PlacementGroupStrategy: a.PlacementGroupStrategy,
		MaxRanksPerNode: a.MaxRanksPerNode, Routing: a.Routing, MaxOngoingRequests: a.MaxOngoingRequests,
	}
}

func (s *side) applyTo(a *Application) {
	a.Engine, a.DataParallel, a.NumReplicas, a.NumGroups = s.Engine, s.DataParallel, s.NumReplicas,
		s.NumGroups
	a.Resources, a.PlacementGroupStrategy, a.MaxRanksPerNode = s.Resources, s.PlacementGroupStrategy,
		s.MaxRanksPerNode
	a.Routing, a.MaxOngoingRequests = s.Routing, s.MaxOngoingRequests
}

// splitter makes the drafts of its pools from the draft of an application.
type splitter struct{ *draft }

// hasPools reports whether the application has a prefill and a decode pool.
func (a splitter) hasPools() bool {
	return a.has("prefill") || a.has("decode") || a.has("disaggregation") || a.Engine.Kind == KindAttach &&
		(slices.ContainsFunc(a.Engine.Ranks, func(r AttachRank) bool { return r.Role != RoleBoth }) ||
			slices.ContainsFunc(a.Engine.Services, func(s AttachService) bool { return s.Role != RoleBoth }))
}

// split returns the pools of the application, and the application itself if it has one pool.
func (a splitter) split() []*draft {
	if !a.hasPools() {
		return []*draft{a.draft}
	}
	a.checkSides()
	a.settleDisaggregation()
	if a.Engine.Kind == KindAttach {
		transfer := a.Disaggregation.Transfer
		if !a.isGood("disaggregation.transfer") {
			transfer = ""
		}
		a.checkAttachedRanks(transfer)
	}
	return []*draft{a.pool(PoolPrefill, a.Prefill.written), a.pool(PoolDecode, a.Decode.written)}
}

// pool returns one pool as a draft of its own: the application with what the pool has for itself.
func (a splitter) pool(pool string, written *cursor) *draft {
	p := &draft{Application: a.Application, path: a.at(pool), whole: a.path, d: a.d}
	p.Pool = pool
	together := *a.Disaggregation
	p.Disaggregation = &together
	p.Engine.Ranks = nil
	for i, r := range a.Engine.Ranks {
		if (r.Role == RolePrefill) == (pool == PoolPrefill) {
			p.Engine.Ranks, p.places = append(p.Engine.Ranks, r), append(p.places, i)
		}
	}
	p.Engine.Services = nil
	for _, s := range a.Engine.Services {
		if (s.Role == RolePrefill) == (pool == PoolPrefill) {
			p.Engine.Services = append(p.Engine.Services, s)
		}
	}
	if written != nil {
		readSide(p, written)
	}
	return p
}

// readSide reads the side of a pool over the values of the application.
func readSide(a *draft, written *cursor) {
	was := sideOf(&a.Application)
	s := was
	s.Engine.Command, s.Engine.Args, s.Engine.Env = nil, nil, nil
	s.Engine.Ranks, s.Engine.Services = nil, nil
	s.Resources.Labels, s.Routing.Params = nil, nil
	a.d.isOverlay = true
	written.readStruct(reflect.ValueOf(&s).Elem())
	a.d.isOverlay = false
	s.Engine.Args = was.Engine.Args.with(s.Engine.Args)
	s.Engine.Env = mergeMaps(was.Engine.Env, s.Engine.Env)
	s.Resources.Labels = mergeMaps(was.Resources.Labels, s.Resources.Labels)
	s.Engine.Ranks, s.Engine.Services = was.Engine.Ranks, was.Engine.Services
	if !a.d.has(a.path + ".engine.command") {
		s.Engine.Command = was.Engine.Command
	}
	if !a.d.has(a.path+".routing.policy") && !a.d.has(a.path+".routing.params") {
		s.Routing.Params = was.Routing.Params
	}
	s.applyTo(&a.Application)
	for _, key := range []string{"family", "ranks", "services"} {
		if at := "engine." + key; a.Engine.Kind == KindAttach && a.d.has(a.path+"."+at) {
			a.wrong(at, key+" stands in the application's engine", "write it there, each rank with its role")
		}
	}
}

// with returns the arguments with others over them: a flag that is set already gets the new value in its
// place, the others follow.
func (a Args) with(over Args) Args {
	out := slices.Clone(a)
	replaced := map[int]bool{}
	for _, arg := range over {
		i := slices.IndexFunc(out[:len(a)], func(old Arg) bool { return old.flag() == arg.flag() })
		if i < 0 || replaced[i] {
			out = append(out, arg) // checkArgs refuses a flag that is written twice
			continue
		}
		out[i], replaced[i] = arg, true
	}
	return out
}

func mergeMaps(was, over map[string]string) map[string]string {
	if len(over) == 0 {
		return was
	}
	out := make(map[string]string, len(was)+len(over))
	maps.Copy(out, was)
	maps.Copy(out, over)
	return out
}

// checkSides checks what is written at the application's level beside the sides.
func (a splitter) checkSides() {
	attached := a.Engine.Kind == KindAttach
	hasPrefill, hasDecode := a.has("prefill"), a.has("decode")
	missing := func(side, other string) {
		a.d.fault(a.d.where(a.at(other)), a.at(side), Fault{
			Message: other + " without " + side + ": the two stand together",
			Hint:    "write " + side + ": {data_parallel: {dp_size: N}}",
		})
	}
	switch {
	case attached:
	case !hasPrefill && !hasDecode:
		a.wrong("disaggregation", "the application has no prefill and decode ranks",
			"write prefill: {data_parallel: {dp_size: N}} and decode: {data_parallel: {dp_size: N}}, or "+
				"leave disaggregation out")
	case !hasDecode:
		missing("decode", "prefill")
	case !hasPrefill:
		missing("prefill", "decode")
	}
	sizes := []string{"data_parallel", "num_replicas", "num_groups", "autoscaling_config"}
	hint := "write it under prefill: and under decode:"
	if attached && !hasPrefill && !hasDecode { // both pools may share a coupling
		sizes[0], hint = "data_parallel.dp_size", "leave it out: the ranks of each role are counted"
	}
	for _, key := range sizes {
		if a.has(key) {
			a.wrong(key, "each pool has its own "+key, hint)
		}
	}
	if attached {
		a.checkRoles()
	}
}

func (a splitter) checkRoles() {
	key := "engine.ranks"
	if !a.has(key) {
		key = "engine.services"
	}
	ranks, services := a.Engine.Ranks, a.Engine.Services
	hasDecode := slices.ContainsFunc(ranks, func(r AttachRank) bool { return r.Role != RolePrefill }) ||
		slices.ContainsFunc(services, func(s AttachService) bool { return s.Role != RolePrefill })
	if a.isSound(key) && len(ranks)+len(services) > 0 && !hasDecode {
		a.wrong(key, "the decode pool has no rank: all have role: prefill",
			"write role: decode, or leave role out, at a rank that computes answers")
	}
}

// settleDisaggregation fills in the transfer, and checks that the engines can do it.
func (a splitter) settleDisaggregation() {
	if a.Disaggregation == nil {
		a.Disaggregation = new(Disaggregation)
		setDefaults(reflect.ValueOf(a.Disaggregation).Elem())
	}
	t, able := a.Disaggregation, transfersOf(&a.Application)
	switch {
	case t.Transfer == "" && a.isGood("disaggregation.transfer") && len(able) > 0:
		t.Transfer = able[0]
	case !a.isGood("disaggregation.transfer", "engine.kind", "engine.family"):
	case len(able) == 0:
		a.wrong("engine.family", "engines of family "+a.Engine.Family+" cannot pass KV blocks on",
			"write family: vllm or sglang, or leave the roles and disaggregation out")
	case !slices.Contains(able, t.Transfer):
		of := "kind " + string(a.Engine.Kind)
		if a.Engine.Kind == KindAttach {
			of = "family " + a.Engine.Family
		}
		a.refuse("disaggregation.transfer", "engines of "+of+" cannot do this transfer", t.Transfer,
			strings.Join(able, " | "), "leave transfer out for "+able[0])
	}
	if a.Engine.Kind == KindAttach && a.isSound("disaggregation.colocate") {
		a.wrong("disaggregation.colocate", "dpserve does not place attached engines", "leave it out")
	}
	if t.Decide == DecideAlways && a.isGood("disaggregation.decide") {
		a.d.warn(a.at("disaggregation.decide"), "every prompt goes to a prefill rank: short prompts (below "+
			"about 2,048 uncached tokens) and prefill-heavy agent traffic lose",
			"write decide: isl, or uncached>=2048")
	}
}

// transfersOf lists the transfers that the engines of an application can do, the default first.
func transfersOf(a *Application) []string {
	ofVLLM := []string{TransferNIXL, TransferNIXLPush, TransferMooncake}
	switch a.Engine.Kind {
	case KindSim:
		return []string{TransferSim, TransferNIXL, TransferNIXLPush}
	case KindVLLM:
		return ofVLLM
	case KindSGLang:
		return []string{TransferSGLang}
	case KindAttach:
	}
	switch a.Engine.Family {
	case FamilyVLLM:
		return append(ofVLLM, TransferSim)
	case FamilySGLang:
		return []string{TransferSGLang}
	case FamilyOpenAI:
		return nil
	default:
		return append(ofVLLM, TransferSGLang, TransferSim)
	}
}

// Fields of pd.
const (
	pdEngineID    = "engine_id"
	pdSideChannel = "side_channel"
	pdTPSize      = "tp_size"
	pdBootstrap   = "bootstrap"
)

// pdFields returns the fields of pd that a transfer needs.
func pdFields(transfer string) []string {
	switch transfer {
	case TransferNIXLPush:
		return []string{pdEngineID, pdSideChannel, pdTPSize}
	case TransferMooncake, TransferSGLang:
		return []string{pdBootstrap}
	default: // the answers of the engine say it
		return nil
	}
}

// checkPD runs the rules of a rank's role and pd. transfer is "" if the application has one pool.
func checkPD(d *decoder, transfer string, r *AttachRank, path string, claimed taken) {
	path = join(path, "pd")
	switch {
	case r.Role != RolePrefill:
		if d.isSound(path) {
			d.wrong(path, "pd is for ranks with role: prefill", "leave it out, or write role: prefill")
		}
		return
	case transfer == "" || !d.isGood(path):
		return
	}
	needed := pdFields(transfer)
	for _, field := range []string{pdEngineID, pdSideChannel, pdTPSize, pdBootstrap} {
		at, isNeeded := join(path, field), slices.Contains(needed, field)
		switch {
		case isNeeded && !d.has(at) && d.isGood(at):
			d.wrong(at, "transfer "+transfer+" needs pd."+field+" of each prefill rank",
				"write pd: {"+strings.Join(needed, ": …, ")+": …}")
		case !isNeeded && d.isSound(at):
			d.wrong(at, "transfer "+transfer+" takes no pd."+field, "leave it out")
		}
	}
	if r.PD == nil {
		return
	}
	if r.PD.Bootstrap = strings.TrimSuffix(r.PD.Bootstrap, "/"); d.isSound(join(path, pdBootstrap)) {
		d.checkURL(join(path, pdBootstrap), r.PD.Bootstrap)
	}
	if at := join(path, pdSideChannel); d.isSound(at) {
		if port := r.PD.SideChannel[strings.LastIndexByte(r.PD.SideChannel, ':')+1:]; !isPort(port) {
			d.unlike(at, r.PD.SideChannel, "HOST:PORT", "ports go from 1 to 65535")
		}
	}
	d.claim(claimed, join(path, pdEngineID), "engine id", r.PD.EngineID)
}

// checkTransferConfig refuses what dpserve writes itself in the KV transfer configuration of an engine.
// Beside pools, it refuses engines that only prefill or only decode. key is the one key that the argument
// sets, "" for a whole configuration.
func checkTransferConfig(a *draft, path, key string, v any) {
	config, ok := v.(map[string]any)
	if text, isText := v.(string); isText {
		ok = json.Unmarshal([]byte(text), &config) == nil
	}
	if key != "" {
		config, ok = map[string]any{key: v}, true
	}
	if !ok {
		return
	}
	role, hasRole := config["kv_role"]
	if a.Pool == "" {
		if hasRole && role != "kv_both" {
			a.d.wrong(path, "kv_role makes an engine a prefill or a decode engine",
				"write prefill: and decode:, which set it; only kv_role kv_both works without them")
		}
		return
	}
	for _, owned := range [][2]string{
		{"kv_role", "the pool is the role: leave it out"},
		{"kv_connector", "write disaggregation.transfer"},
		{"engine_id", "each rank needs its own, new at each start: leave it out"},
	} {
		if _, written := config[owned[0]]; written {
			a.d.wrong(path, "dpserve writes "+owned[0]+" of a pool's engines itself", owned[1])
			return
		}
	}
}

// transferKey returns the key of the KV transfer configuration that a flag sets, "" for all of it; ok is
// false for other flags.
func transferKey(flag string) (key string, ok bool) {
	head, key, _ := strings.Cut(flag, ".")
	return key, head == "kv-transfer-config"
}

// checkPair refuses pools whose engines cannot exchange KV blocks.
func checkPair(prefill, decode *draft) {
	const key = "engine.kind"
	p, d := prefill.Engine.Kind, decode.Engine.Kind
	if p != d && prefill.isSound(key) && decode.isSound(key) {
		of := decode
		if prefill.d.has(prefill.path + "." + key) {
			of = prefill
		}
		of.refuse(key, "prefill and decode engines pair only if they are of one kind",
			fmt.Sprintf("prefill %s, decode %s", p, d), "one kind", "write kind at the application's engine")
		return
	}
	for flag, what := range map[string]string{
		"block-size": "block size", "page-size": "page size", "kv-cache-dtype": "type of the KV cache",
		"dtype": "data type",
	} {
		p, hasP := prefill.Engine.Args.find(flag)
		d, hasD := decode.Engine.Args.find(flag)
		if !hasP || !hasD || valueText(p.Value) == valueText(d.Value) {
			continue
		}
		of, name := decode, d.Name
		if !decode.d.has(decode.path + "." + join("engine.args", name)) {
			of, name = prefill, p.Name
		}
		of.refuse(join("engine.args", name), "prefill and decode engines pair only with one "+what,
			fmt.Sprintf("prefill %s, decode %s", valueText(p.Value), valueText(d.Value)), "equal values",
			"write it once, at the application's engine.args")
	}
}
