package app

import (
	"regexp"
	"strconv"
	"strings"
)

// Bounds of single values. They are generous, and finite so that sums and products cannot overflow.
const (
	// MaxDPSize is the largest data-parallel group.
	MaxDPSize = 4096
	// MaxRanks is the largest number of ranks of an application.
	MaxRanks = 65_536

	maxApplications = 1_000
	maxRanksPerNode = 1_024
	maxGPUs         = 1_024
	maxCPUs         = 65_536
	maxMemoryGiB    = 1 << 20
	maxOngoing      = 1_000_000
	maxQueued       = 1_000_000
	maxAttempts     = 16
)

// draft is an application during parsing, with values of the file that are not stored.
type draft struct {
	Application
	path    string
	scaling scaling
}

// scaling is autoscaling_config, which must describe a fixed size.
type scaling struct{ minimum, maximum, initial int }

func fileFields() []field[[]*draft] {
	return []field[[]*draft]{{key: "applications", read: readApplications}}
}

func readApplications(c cursor, into *[]*draft) {
	c.each(maxApplications, func(item cursor) {
		a := &draft{Application: Default(), path: item.path}
		readFields(item, a, applicationFields())
		*into = append(*into, a)
	})
	if c.n.shape == listShape && len(c.n.items) == 0 {
		c.refuse(Fault{Found: "an empty list", Wanted: "at least one application", Hint: hintSmallest})
	}
}

func applicationFields() []field[draft] {
	return []field[draft]{
		{key: "name", read: text(func(a *draft) *string { return &a.Name })},
		{key: "route_prefix", read: text(func(a *draft) *string { return &a.RoutePrefix })},
		{key: "model", read: child(func(a *draft) *Model { return &a.Model }, modelFields)},
		{key: "engine", read: child(func(a *draft) *Engine { return &a.Engine }, engineFields)},
		{key: "data_parallel", read: child(func(a *draft) *DataParallel { return &a.DataParallel },
			dataParallelFields)},
		{key: "num_replicas", read: whole(func(a *draft) *int { return &a.NumReplicas }, 1, MaxRanks)},
		{key: "num_groups", read: whole(func(a *draft) *int { return &a.NumGroups }, 1, MaxRanks)},
		{key: "autoscaling_config", read: child(func(a *draft) *scaling { return &a.scaling },
			scalingFields)},
		{key: "resources", read: child(func(a *draft) *Resources { return &a.Resources }, resourceFields)},
		{
			key:  "placement_group_strategy",
			read: word(func(a *draft) *string { return &a.PlacementGroupStrategy }, strategies()...),
		},
		{key: "max_ranks_per_node", read: whole(func(a *draft) *int { return &a.MaxRanksPerNode }, 1,
			maxRanksPerNode)},
		{key: "routing", read: child(func(a *draft) *Routing { return &a.Routing }, routingFields)},
		{key: "max_ongoing_requests", read: whole(func(a *draft) *int { return &a.MaxOngoingRequests }, 1,
			maxOngoing)},
		{key: "max_queued_requests", read: readMaxQueued},
		{key: "timeouts", read: child(func(a *draft) *Timeouts { return &a.Timeouts }, timeoutFields)},
		{key: "retries", read: child(func(a *draft) *Retries { return &a.Retries }, retryFields)},
		{
			key:  "health_check_period_s",
			read: seconds(func(a *draft) *float64 { return &a.HealthCheckPeriodS }),
		},
		{
			key:  "health_check_timeout_s",
			read: seconds(func(a *draft) *float64 { return &a.HealthCheckTimeoutS }),
		},
		{key: "graceful_shutdown_timeout_s", read: func(c cursor,
			a *draft,
		) {
			c.secondsOrZero(&a.GracefulShutdownTimeout)
		}},
		{key: "prefill", later: true},
		{key: "decode", later: true},
		{key: "disaggregation", later: true},
	}
}

// readMaxQueued refuses Ray's -1 (no bound) by name: an unbounded queue turns overload into time-outs for all
// requests.
func readMaxQueued(c cursor, a *draft) {
	if v, ok := c.n.whole(); ok && v < 0 {
		c.refuseValue("an integer from 0 to "+strconv.Itoa(maxQueued),
			"a queue without a bound is refused; leave the key out for "+
				strconv.Itoa(DefaultMaxQueuedRequests))
		return
	}
	c.whole(&a.MaxQueuedRequests, 0, maxQueued)
}

func scalingFields() []field[scaling] {
	return []field[scaling]{
		{key: "min_replicas", read: whole(func(s *scaling) *int { return &s.minimum }, 1, MaxRanks)},
		{key: "max_replicas", read: whole(func(s *scaling) *int { return &s.maximum }, 1, MaxRanks)},
		{key: "initial_replicas", read: whole(func(s *scaling) *int { return &s.initial }, 1, MaxRanks)},
	}
}

func modelFields() []field[Model] {
	return []field[Model]{
		{key: "id", read: text(func(m *Model) *string { return &m.ID })},
		{key: "source", read: text(func(m *Model) *string { return &m.Source })},
		{key: "aliases", read: texts(func(m *Model) *[]string { return &m.Aliases })},
		{key: "adapters", read: func(c cursor, m *Model) {
			c.each(maxListItems, func(item cursor) {
				var a Adapter
				readFields(item, &a, adapterFields())
				m.Adapters = append(m.Adapters, a)
			})
		}},
	}
}

func adapterFields() []field[Adapter] {
	return []field[Adapter]{
		{key: "id", read: text(func(a *Adapter) *string { return &a.ID })},
		{key: "source", read: text(func(a *Adapter) *string { return &a.Source })},
	}
}

func kinds() []string {
	return []string{string(KindSim), string(KindVLLM), string(KindSGLang), string(KindAttach)}
}

func engineFields() []field[Engine] {
	return []field[Engine]{
		{key: "kind", read: word(func(e *Engine) *string { return (*string)(&e.Kind) }, kinds()...)},
		{key: "family", read: word(func(e *Engine) *string { return &e.Family }, FamilyVLLM, FamilySGLang,
			FamilyOpenAI)},
		{key: "command", read: texts(func(e *Engine) *[]string { return &e.Command })},
		{key: "args", read: readArgs},
		{key: "env", read: func(c cursor, e *Engine) {
			c.pairs(&e.Env, envName,
				"the name of an environment variable")
		}},
		{key: "kv_events", read: word(func(e *Engine) *string { return &e.KVEvents }, KVEventsAuto,
			KVEventsOff)},
		{key: "startup_timeout_s", read: seconds(func(e *Engine) *float64 { return &e.StartupTimeoutS })},
		{key: "stall_timeout_s", read: seconds(func(e *Engine) *float64 { return &e.StallTimeoutS })},
		{key: "ranks", read: func(c cursor, e *Engine) {
			c.each(MaxRanks, func(item cursor) {
				r := AttachRank{Addressing: AddressURL, Role: RoleBoth}
				readFields(item, &r, rankFields())
				e.Ranks = append(e.Ranks, r)
			})
		}},
	}
}

func rankFields() []field[AttachRank] {
	return []field[AttachRank]{
		{key: "url", read: text(func(r *AttachRank) *string { return &r.URL })},
		{key: "addressing", read: word(func(r *AttachRank) *string { return &r.Addressing }, AddressURL,
			AddressHeader, AddressBody)},
		{key: "selector", read: whole(func(r *AttachRank) *int { return &r.Selector }, 0, MaxDPSize-1)},
		{key: "group", read: whole(func(r *AttachRank) *int { return &r.Group }, 0, MaxRanks-1)},
		{key: "rank", read: func(c cursor, r *AttachRank) {
			r.Number = new(int)
			c.whole(r.Number, 0, MaxDPSize-1)
		}},
		{key: "role", read: readRole},
		{key: "node", read: text(func(r *AttachRank) *string { return &r.Node })},
		{key: "kv_events", read: func(c cursor, r *AttachRank) {
			r.KVEvents = &KVSocket{}
			readFields(c, r.KVEvents, socketFields())
		}},
		{key: "pd", later: true},
	}
}

func readRole(c cursor, r *AttachRank) {
	if c.n.text == "prefill" || c.n.text == "decode" {
		c.refuse(notYet("role " + strconv.Quote(c.n.text)))
		return
	}
	c.word(&r.Role, RoleBoth)
}

func socketFields() []field[KVSocket] {
	return []field[KVSocket]{
		{key: "connect", read: text(func(s *KVSocket) *string { return &s.Connect })},
		{key: "bind", read: text(func(s *KVSocket) *string { return &s.Bind })},
		{key: "replay", read: text(func(s *KVSocket) *string { return &s.Replay })},
	}
}

func dataParallelFields() []field[DataParallel] {
	return []field[DataParallel]{
		{key: "dp_size", read: whole(func(p *DataParallel) *int { return &p.DPSize }, 1, MaxDPSize)},
		{key: "coupling", read: word(func(p *DataParallel) *string { return (*string)(&p.Coupling) },
			string(Independent), string(Lockstep))},
	}
}

func strategies() []string {
	return []string{StrategyPack, StrategyStrictPack, StrategySpread, StrategyStrictSpread}
}

var (
	envName   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	labelName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?$`)
)

func resourceFields() []field[Resources] {
	return []field[Resources]{
		{key: "gpus", read: func(c cursor, r *Resources) {
			c.whole(&r.GPUs, 0, maxGPUs)
			r.GPUsSet = true
		}},
		{key: "cpus", read: func(c cursor, r *Resources) { c.number(&r.CPUs, maxCPUs, true, "cpus") }},
		{key: "memory_gib", read: func(c cursor, r *Resources) {
			c.number(&r.MemoryGiB, maxMemoryGiB, true,
				"GiB")
		}},
		{key: "labels", read: func(c cursor, r *Resources) {
			c.pairs(&r.Labels, labelName, "a label: letters, digits and . _ / - inside")
		}},
	}
}

func routingFields() []field[Routing] {
	return []field[Routing]{
		{key: "policy", read: readPolicy},
		{key: "preset", read: word(func(r *Routing) *string { return &r.Preset }, PresetDocumented,
			PresetTuned)},
		{key: "params", read: readParams},
		{key: "identity", read: readIdentity},
		{key: "busy_threshold", read: readBusyThreshold},
		{key: "slo", later: true},
	}
}

// policies are those of this version. laterPolicies have only a name yet.
func policies() []string {
	return []string{
		"power-of-two", "least-loaded", "round-robin", "random", "direct", "scoring", "cache-aware",
		"prefix-aware", "kv", "least-kv", "lmetric", "lmetric-1",
		"lpwl", "min-ttft", "sticky", "chwbl", "session-affinity", "mex",
	}
}

func laterPolicies() []string {
	return []string{"group-balance", "group-least-kv"}
}

func readPolicy(c cursor, r *Routing) {
	for _, name := range laterPolicies() {
		if c.n.text == name {
			f := notYet("policy " + strconv.Quote(name))
			f.Wanted = strings.Join(policies(), " | ")
			f.Hint = "it comes with a later version; take one of these until then"
			c.refuse(f)
			return
		}
	}
	c.word(&r.Policy, policies()...)
}

func readIdentity(c cursor, r *Routing) {
	if c.n.text == "learned" {
		c.refuse(notYet("identity " + strconv.Quote(c.n.text)))
		return
	}
	c.word(&r.Identity, IdentityText, IdentityTokens)
}

// readBusyThreshold reads a share of the KV cache.
func readBusyThreshold(c cursor, r *Routing) {
	var v float64
	c.number(&v, 1, true, "a share")
	r.BusyThreshold = &v
}

func timeoutFields() []field[Timeouts] {
	return []field[Timeouts]{
		{key: "queue_s", read: seconds(func(t *Timeouts) *float64 { return &t.QueueS })},
		{key: "first_token_s", read: seconds(func(t *Timeouts) *float64 { return &t.FirstTokenS })},
		{key: "between_tokens_s", read: seconds(func(t *Timeouts) *float64 { return &t.BetweenTokensS })},
	}
}

func retryFields() []field[Retries] {
	return []field[Retries]{
		{key: "attempts", read: whole(func(r *Retries) *int { return &r.Attempts }, 1, maxAttempts)},
		{key: "continue_streams", later: true},
	}
}
