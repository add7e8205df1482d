package app

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Print returns f as canonical YAML without values at their default. Parse of the result gives f again.
// `validate --print` shows it.
func (f *File) Print() []byte {
	var p page
	p.line(0, "applications:")
	for _, a := range f.Applications {
		p.list(1, applicationLines(a))
	}
	return p.text
}

// lines are the entries of one map.
type lines []line

type line struct {
	key   string
	text  string
	below lines
	each  []lines // a list of maps
}

func (l *lines) put(key, text string) { *l = append(*l, line{key: plainOrQuoted(key), text: text}) }

// word adds a text unless it is the default.
func (l *lines) word(key, value, standard string) {
	if value != standard {
		l.put(key, plainOrQuoted(value))
	}
}

// whole adds an integer unless it is the default.
func (l *lines) whole(key string, value, standard int) {
	if value != standard {
		l.put(key, strconv.Itoa(value))
	}
}

// number adds a number unless it is the default.
func (l *lines) number(key string, value, standard float64) {
	if value != standard {
		l.put(key, strconv.FormatFloat(value, 'g', -1, 64))
	}
}

// block adds a map unless it is empty.
func (l *lines) block(key string, below lines) {
	if len(below) > 0 {
		*l = append(*l, line{key: key, below: below})
	}
}

func (l *lines) texts(key string, values []string) {
	if len(values) == 0 {
		return
	}
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = plainOrQuoted(v)
	}
	l.put(key, "["+strings.Join(quoted, ", ")+"]")
}

func (l *lines) pairs(key string, values map[string]string) {
	var below lines
	for _, k := range slices.Sorted(maps.Keys(values)) {
		below.put(k, plainOrQuoted(values[k]))
	}
	l.block(key, below)
}

func applicationLines(a *Application) lines {
	var l lines
	standard := Default()
	standard.Routing.Policy = DefaultPolicy(a.DataParallel.Coupling)
	l.put("name", plainOrQuoted(a.Name))
	l.word("route_prefix", a.RoutePrefix, standard.RoutePrefix)
	l.block("model", modelLines(&a.Model))
	l.block("engine", engineLines(&a.Engine, &standard.Engine))
	l.block("data_parallel", lines{
		{key: "dp_size", text: strconv.Itoa(a.DataParallel.DPSize)},
		{key: "coupling", text: string(a.DataParallel.Coupling)},
	})
	l.put("num_replicas", strconv.Itoa(a.NumReplicas))
	l.block("resources", resourceLines(&a.Resources))
	l.word("placement_group_strategy", a.PlacementGroupStrategy, standard.PlacementGroupStrategy)
	l.whole("max_ranks_per_node", a.MaxRanksPerNode, 0)
	l.block("routing", routingLines(&a.Routing, &standard.Routing))
	l.whole("max_ongoing_requests", a.MaxOngoingRequests, 0)
	l.whole("max_queued_requests", a.MaxQueuedRequests, standard.MaxQueuedRequests)
	l.limits(a, &standard)
	return l
}

// limits adds time-outs, retries and health checks.
func (l *lines) limits(a, standard *Application) {
	var t, r lines
	t.number("queue_s", a.Timeouts.QueueS, standard.Timeouts.QueueS)
	t.number("first_token_s", a.Timeouts.FirstTokenS, standard.Timeouts.FirstTokenS)
	t.number("between_tokens_s", a.Timeouts.BetweenTokensS, standard.Timeouts.BetweenTokensS)
	l.block("timeouts", t)
	r.whole("attempts", a.Retries.Attempts, standard.Retries.Attempts)
	l.block("retries", r)
	l.number("health_check_period_s", a.HealthCheckPeriodS, standard.HealthCheckPeriodS)
	l.number("health_check_timeout_s", a.HealthCheckTimeoutS, standard.HealthCheckTimeoutS)
	l.number("graceful_shutdown_timeout_s", a.GracefulShutdownTimeout, standard.GracefulShutdownTimeout)
}

func modelLines(m *Model) lines {
	var l lines
	l.put("id", plainOrQuoted(m.ID))
	l.word("source", m.Source, m.ID)
	l.texts("aliases", m.Aliases)
	var each []lines
	for _, a := range m.Adapters {
		each = append(each, lines{
			{key: "id", text: plainOrQuoted(a.ID)},
			{key: "source", text: plainOrQuoted(a.Source)},
		})
	}
	return append(l, listLine("adapters", each)...)
}

// listLine returns a list of maps, or nil if it is empty.
func listLine(key string, each []lines) lines {
	if len(each) == 0 {
		return nil
	}
	return lines{{key: key, each: each}}
}

func engineLines(e, standard *Engine) lines {
	var l, args lines
	l.put("kind", string(e.Kind))
	l.word("family", e.Family, "")
	l.texts("command", e.Command)
	for _, a := range e.Args {
		args.put(a.Name, valueText(a.Value))
	}
	l.block("args", args)
	l.pairs("env", e.Env)
	l.word("kv_events", e.KVEvents, standard.KVEvents)
	l.number("startup_timeout_s", e.StartupTimeoutS, standard.StartupTimeoutS)
	l.number("stall_timeout_s", e.StallTimeoutS, standard.StallTimeoutS)
	var each []lines
	for i := range e.Ranks {
		each = append(each, rankLines(&e.Ranks[i]))
	}
	return append(l, listLine("ranks", each)...)
}

func rankLines(r *AttachRank) lines {
	var l lines
	l.put("url", plainOrQuoted(r.URL))
	if r.Addressing != AddressURL {
		l.put("addressing", r.Addressing)
		l.put("selector", strconv.Itoa(r.Selector))
	}
	l.whole("group", r.Group, 0)
	if r.Number != nil {
		l.put("rank", strconv.Itoa(*r.Number))
	}
	l.word("role", r.Role, RoleBoth)
	l.word("node", r.Node, "")
	if r.KVEvents != nil {
		var k lines
		k.word("connect", r.KVEvents.Connect, "")
		k.word("bind", r.KVEvents.Bind, "")
		k.word("replay", r.KVEvents.Replay, "")
		l.block("kv_events", k)
	}
	return l
}

func resourceLines(r *Resources) lines {
	var l lines
	if r.GPUsSet {
		l.put("gpus", strconv.Itoa(r.GPUs))
	}
	l.number("cpus", r.CPUs, 0)
	l.number("memory_gib", r.MemoryGiB, 0)
	l.pairs("labels", r.Labels)
	return l
}

func routingLines(r, standard *Routing) lines {
	var l, params lines
	l.word("policy", r.Policy, standard.Policy)
	l.word("preset", r.Preset, standard.Preset)
	for _, k := range slices.Sorted(maps.Keys(r.Params)) {
		params.put(k, valueText(r.Params[k]))
	}
	l.block("params", params)
	l.word("identity", r.Identity, standard.Identity)
	if r.BusyThreshold != nil {
		l.put("busy_threshold", strconv.FormatFloat(*r.BusyThreshold, 'g', -1, 64))
	}
	return l
}

// valueText returns any argument as text: lists and maps as JSON, which is YAML.
func valueText(v any) string {
	if s, ok := v.(string); ok {
		return plainOrQuoted(s)
	}
	return string(appendJSON(nil, v))
}

var plainWord = regexp.MustCompile(`^[A-Za-z_/][A-Za-z0-9_./-]*$`)

// plainOrQuoted writes s without quotes if no YAML reader, of any version, reads it as something other than
// this text.
func plainOrQuoted(s string) string {
	switch strings.ToLower(s) {
	case "null", "true", "false", "yes", "no", "on", "off", "y", "n":
	default:
		if plainWord.MatchString(s) {
			return s
		}
	}
	return string(appendText(nil, s))
}

// page collects lines with two spaces per level.
type page struct{ text []byte }

func (p *page) line(level int, text string) {
	p.text = append(p.text, strings.Repeat("  ", level)...)
	p.text = append(append(p.text, text...), '\n')
}

func (p *page) block(level int, l lines) {
	for _, e := range l {
		switch {
		case len(e.each) > 0:
			p.line(level, e.key+":")
			for _, item := range e.each {
				p.list(level+1, item)
			}
		case len(e.below) > 0:
			p.line(level, e.key+":")
			p.block(level+1, e.below)
		default:
			p.line(level, e.key+": "+e.text)
		}
	}
}

// list adds l as one item of a list: its first line has the dash.
func (p *page) list(level int, l lines) {
	start := len(p.text)
	p.block(level+1, l)
	copy(p.text[start+2*level:], "- ")
}
