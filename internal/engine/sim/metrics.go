package sim

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// page writes the Prometheus text format: HELP, TYPE and, for counters and histograms, the _created twin.
type page struct {
	b       []byte
	model   string
	created float64 // unix seconds
}

// sample is one series: extra labels in order before and behind model_name, by the alphabet of the client
// library.
type sample struct {
	engine string // "" = no engine label
	before string // label="value", sorts between engine and model_name
	after  string // sorts behind model_name
	value  float64
}

func (g *page) head(name, kind, help string) {
	g.b = append(g.b, "# HELP vllm:"...)
	g.b = append(append(append(g.b, name...), ' '), help...)
	g.b = append(append(g.b, "\n# TYPE vllm:"...), name...)
	g.b = append(append(append(g.b, ' '), kind...), '\n')
}

func (g *page) line(name string, s *sample) {
	g.b = append(append(g.b, "vllm:"...), name...)
	g.b = append(g.b, '{')
	if s.engine != "" {
		g.b = append(append(append(g.b, `engine="`...), s.engine...), `",`...)
	}
	if s.before != "" {
		g.b = append(append(g.b, s.before...), ',')
	}
	g.b = append(append(append(g.b, `model_name="`...), g.model...), '"')
	if s.after != "" {
		g.b = append(append(g.b, ','), s.after...)
	}
	g.b = appendMetric(append(g.b, "} "...), s.value)
	g.b = append(g.b, '\n')
}

// appendMetric spells a value as the Python client does.
func appendMetric(b []byte, x float64) []byte {
	if x == math.Trunc(x) && math.Abs(x) < 1e6 {
		return append(strconv.AppendInt(b, int64(x), 10), ".0"...)
	}
	if math.Abs(x) >= 1e6 {
		return strconv.AppendFloat(b, x, 'e', -1, 64)
	}
	return strconv.AppendFloat(b, x, 'f', -1, 64)
}

func (g *page) gauge(name, help string, samples ...sample) {
	g.head(name, "gauge", help)
	for i := range samples {
		g.line(name, &samples[i])
	}
}

func (g *page) counter(name, help string, samples ...sample) {
	g.head(name+"_total", "counter", help)
	for i := range samples {
		g.line(name+"_total", &samples[i])
	}
	g.twin(name, help, samples)
}

func (g *page) twin(name, help string, samples []sample) {
	g.head(name+"_created", "gauge", help)
	for _, s := range samples {
		s.value = g.created
		g.line(name+"_created", &s)
	}
}

// histograms writes the histograms of a table, of all ranks.
func (g *page) histograms(snaps []snapshot, table []histogramSpec, of func(*snapshot) []histogram) {
	for k, spec := range table {
		g.head(spec.name, "histogram", spec.help)
		plain := make([]sample, len(snaps))
		for i := range snaps {
			plain[i].engine = snaps[i].engine
			g.histogram(spec.name, plain[i], &of(&snaps[i])[k])
		}
		g.twin(spec.name, spec.help, plain)
	}
}

// histogram writes the lines of one rank.
func (g *page) histogram(name string, s sample, h *histogram) {
	bucket := name + "_bucket"
	for k, n := range h.counts {
		s.value += float64(n)
		s.before = h.labels[k]
		g.line(bucket, &s)
	}
	s.before = ""
	g.line(name+"_count", &s)
	s.value = h.sum
	g.line(name+"_sum", &s)
}

// snapshot is what a page shows of one rank.
type snapshot struct {
	engine   string
	stats    em.Stats
	meters   meters
	transfer *transferMeters // nil = without a connector
}

// each makes one sample per rank.
func each(snaps []snapshot, value func(*em.Stats) float64) []sample {
	return labelled(snaps, "", "", value)
}

func labelled(snaps []snapshot, before, after string, value func(*em.Stats) float64) []sample {
	out := make([]sample, len(snaps))
	for i := range snaps {
		out[i] = sample{engine: snaps[i].engine, before: before, after: after, value: value(&snaps[i].stats)}
	}
	return out
}

func zero(*em.Stats) float64 { return 0 }

func one(*em.Stats) float64 { return 1 }

func (g *page) gauges(snaps []snapshot, asleep bool) {
	running := func(s *em.Stats) float64 { return float64(s.Running) }
	waiting := func(s *em.Stats) float64 { return float64(s.Waiting) }
	usage := func(s *em.Stats) float64 { return float64(s.UsedBlocks) / float64(s.Blocks) }
	g.gauge("num_requests_running", "Requests in the running batch.", each(snaps, running)...)
	g.gauge("num_requests_waiting", "Requests in the queue.", each(snaps, waiting)...)
	g.gauge("num_requests_waiting_by_reason", "Requests in the queue by what they wait for.",
		append(labelled(snaps, "", `reason="capacity"`, func(s *em.Stats) float64 {
			return float64(s.Waiting - s.Loading)
		}), labelled(snaps, "", `reason="deferred"`, func(s *em.Stats) float64 {
			return float64(s.Loading)
		})...)...)
	awake, discarded := one, zero
	if asleep {
		awake, discarded = zero, one
	}
	sleep := labelled(snaps, "", `sleep_state="awake"`, awake)
	sleep = append(sleep, labelled(snaps, "", `sleep_state="weights_offloaded"`, zero)...)
	g.gauge("engine_sleep_state", "Sleep state, one series per state.",
		append(sleep, labelled(snaps, "", `sleep_state="discard_all"`, discarded)...)...)
	g.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", each(snaps, usage)...)
}

func (g *page) counters(snaps []snapshot) {
	queries := func(s *em.Stats) float64 { return float64(s.CacheQueries) }
	hits := func(s *em.Stats) float64 { return float64(s.CacheHits) }
	cached := func(s *em.Stats) float64 { return float64(s.PromptCached) }
	loaded := func(s *em.Stats) float64 { return float64(s.PromptLoaded) }
	lookedUp := zero
	if snaps[0].transfer != nil {
		lookedUp = func(s *em.Stats) float64 { return float64(s.PromptTokens - s.PromptCached) }
	}
	g.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", each(snaps, queries)...)
	g.counter("prefix_cache_hits", "Tokens found in the prefix cache.", each(snaps, hits)...)
	g.counter("external_prefix_cache_queries", "Tokens looked up in caches of other engines.",
		each(snaps, lookedUp)...)
	g.counter("external_prefix_cache_hits", "Tokens found in caches of other engines.",
		each(snaps, loaded)...)
	g.counter("num_preemptions", "Requests that lost their blocks.",
		each(snaps, func(s *em.Stats) float64 { return float64(s.Preemptions) })...)
	g.counter("prompt_tokens", "Prompt tokens processed.",
		each(snaps, func(s *em.Stats) float64 { return float64(s.PromptTokens) })...)
	source := labelled(snaps, "", `source="local_compute"`, func(s *em.Stats) float64 {
		return float64(s.PromptTokens - s.PromptCached - s.PromptLoaded)
	})
	source = append(source, labelled(snaps, "", `source="local_cache_hit"`, cached)...)
	g.counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from.",
		append(source, labelled(snaps, "", `source="external_kv_transfer"`, loaded)...)...)
	g.counter("prompt_tokens_cached", "Prompt tokens that were cached.",
		each(snaps, func(s *em.Stats) float64 { return float64(s.PromptCached + s.PromptLoaded) })...)
	tiers := labelled(snaps, "", `source="device"`, cached)
	for _, t := range []string{"host", "p2p", "disk", "external_unspecified"} {
		of := zero
		if t == "p2p" {
			of = loaded
		}
		tiers = append(tiers, labelled(snaps, "", `source="`+t+`"`, of)...)
	}
	g.counter("prompt_tokens_cached_by_source", "Cached prompt tokens by the tier that held them.", tiers...)
	g.counter("generation_tokens", "Tokens generated.",
		each(snaps, func(s *em.Stats) float64 { return float64(s.GeneratedTokens) })...)
	g.ends(snaps)
}

// endReasons are the ways in which requests end.
var endReasons = [...]em.FinishReason{em.FinishStop, em.FinishLength, em.FinishAbort, em.FinishError}

func (g *page) ends(snaps []snapshot) {
	var ends []sample
	for _, why := range endReasons {
		ends = append(ends, labelled(snaps, `finished_reason="`+why.String()+`"`, "",
			func(s *em.Stats) float64 { return float64(s.Finished[why]) })...)
	}
	g.counter("request_success", "Requests that ended, by reason.",
		append(ends, labelled(snaps, `finished_reason="repetition"`, "", zero)...)...)
	var reqs, tokens float64
	for i := range snaps {
		reqs += float64(snaps[i].stats.Rejected[em.RejectRequests])
		tokens += float64(snaps[i].stats.Rejected[em.RejectTokens])
	}
	g.counter("admission_rejections", "Requests turned away by a queue limit.",
		sample{after: `reason="max_num_queued_reqs"`, value: reqs},
		sample{after: `reason="max_num_queued_tokens"`, value: tokens})
}

// config is the info series from which block size and memory are read back.
func (g *page) config(s *Server, snaps []snapshot) {
	m := &s.cfg.Model
	caching := "False"
	if m.PrefixCaching {
		caching = "True"
	}
	g.head("cache_config_info", "gauge", "Settings of the KV cache as labels.")
	for i := range snaps {
		g.b = fmt.Appendf(g.b, `vllm:cache_config_info{block_size="%d",cache_dtype="auto",`+
			`enable_prefix_caching="%s",engine="%s",kv_cache_size_tokens="%d",num_cpu_blocks="None",`+
			`num_gpu_blocks="%d",num_gpu_blocks_override="None",prefix_caching_hash_algo="xxh3",`+
			`sliding_window="None"} 1.0`+"\n", s.cfg.reportedBlockSize(), caching, snaps[i].engine,
			m.Blocks*m.BlockSize, m.Blocks)
	}
}

// meter names a histogram of the engine.
type meter uint8

const (
	meterPrompt meter = iota
	meterGenerated
	meterStepTokens
	meterMaxGenerated
	meterN
	meterMaxTokens
	meterFirstToken
	meterBetween
	meterPerToken
	meterEndToEnd
	meterQueue
	meterInference
	meterPrefill
	meterDecode
	meterPreemptions
	meterComputed
	meterCount
)

// meters are the histograms of one rank. Guarded by the rank's mutex.
type meters struct {
	h     []histogram // by meter
	steps uint64
}

// meterTable is what the histograms of a rank are called and how fine they are: as those of the imitated
// engine.
var meterTable = [meterCount]histogramSpec{
	meterPrompt:       {"request_prompt_tokens", "Prompt tokens per request.", tokenBounds},
	meterGenerated:    {"request_generation_tokens", "Generated tokens per request.", tokenBounds},
	meterStepTokens:   {"iteration_tokens_total", "Tokens per engine step.", stepTokens},
	meterMaxGenerated: {"request_max_num_generation_tokens", "Most tokens a request could get.", tokenBounds},
	meterN:            {"request_params_n", "Parameter n of requests.", smallCounts},
	meterMaxTokens:    {"request_params_max_tokens", "Parameter max_tokens of requests.", tokenBounds},
	meterFirstToken:   {"time_to_first_token_seconds", "Time to the first token in seconds.", secondsFirst},
	meterBetween:      {"inter_token_latency_seconds", "Time between two tokens in seconds.", secondsToken},
	meterPerToken: {
		"request_time_per_output_token_seconds", "Mean time per token of a request in seconds.", secondsToken,
	},
	meterEndToEnd:  {"e2e_request_latency_seconds", "Time from arrival to end in seconds.", secondsRequest},
	meterQueue:     {"request_queue_time_seconds", "Time in the queue in seconds.", secondsRequest},
	meterInference: {"request_inference_time_seconds", "Time in the batch in seconds.", secondsRequest},
	meterPrefill: {
		"request_prefill_time_seconds", "Time from the batch to the first token in seconds.", secondsRequest,
	},
	meterDecode: {
		"request_decode_time_seconds", "Time from the first to the last token in seconds.", secondsRequest,
	},
	meterPreemptions: {"request_num_preemptions", "Preemptions per request.", smallCounts},
	meterComputed: {
		"request_prefill_kv_computed_tokens", "Prompt tokens computed per request.", tokenBounds,
	},
}

// step books the tokens of a step, if one ended since the last call.
func (m *meters) step(s em.Stats) {
	if s.Steps != m.steps {
		m.steps = s.Steps
		m.h[meterStepTokens].observe(float64(s.StepTokens))
	}
}

func (m *meters) token(r *em.Request) {
	t := r.Times()
	if r.Produced() == 1 {
		m.seconds(meterFirstToken, t.First-t.Arrived)
		return
	}
	m.seconds(meterBetween, t.Last-t.Previous)
}

func (m *meters) seconds(k meter, d time.Duration) { m.h[k].observe(max(0, d).Seconds()) }

func (m *meters) finished(r *em.Request) {
	if r.Finish() == em.FinishError || r.Produced() == 0 {
		return
	}
	t, n := r.Times(), r.Produced()
	m.h[meterPrompt].observe(float64(r.Prompt))
	m.h[meterGenerated].observe(float64(n))
	m.h[meterMaxGenerated].observe(float64(r.Output))
	m.h[meterPreemptions].observe(float64(r.Preemptions()))
	m.h[meterComputed].observe(float64(r.Prompt - r.Cached()))
	m.seconds(meterEndToEnd, t.Last-t.Arrived)
	m.seconds(meterQueue, t.Scheduled-t.Arrived)
	m.seconds(meterInference, t.Last-t.Scheduled)
	m.seconds(meterPrefill, t.First-t.Scheduled)
	m.seconds(meterDecode, t.Last-t.First)
	if n > 1 {
		m.seconds(meterPerToken, (t.Last-t.First)/time.Duration(n-1))
	}
}

// histogramSpec is the name of a histogram behind "vllm:", its help, and the upper bounds of its buckets.
type histogramSpec struct {
	name, help string
	bounds     []float64
}

// histogram counts observations in buckets with fixed upper bounds. Guarded by the mutex of its owner.
type histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds: the last is +Inf
	labels []string // of counts
	sum    float64
}

func newHistograms(table []histogramSpec) []histogram {
	out := make([]histogram, len(table))
	for k, spec := range table {
		out[k] = histogram{
			bounds: spec.bounds, counts: make([]uint64, len(spec.bounds)+1),
			labels: make([]string, 0, len(spec.bounds)+1),
		}
		for _, bound := range spec.bounds {
			out[k].labels = append(out[k].labels, `le="`+string(appendMetric(nil, bound))+`"`)
		}
		out[k].labels = append(out[k].labels, `le="+Inf"`)
	}
	return out
}

// copied is a snapshot.
func copied(hs []histogram) []histogram {
	out := slices.Clone(hs)
	for k := range out {
		out[k].counts = slices.Clone(out[k].counts)
	}
	return out
}

func (h *histogram) observe(x float64) {
	h.counts[sort.SearchFloat64s(h.bounds, x)]++
	h.sum += x
}

// Bucket bounds of the imitated engine.
var (
	tokenBounds  = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000}
	secondsFirst = []float64{
		0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
		640, 2560,
	}
	secondsToken = []float64{
		0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
		10, 20, 40, 80,
	}
	secondsRequest = []float64{
		0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
		960, 1920, 7680,
	}
	stepTokens  = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	smallCounts = []float64{1, 2, 5, 10, 20}
)
