// Package loadgen sends load to an OpenAI endpoint and measures the times that a client sees. `dpserve bench`
// uses it.
package loadgen

import (
	"cmp"
	"net/url"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// Mode selects the pacing of the requests.
type Mode string

// Open sends at a rate, independent of the server; Closed keeps a number of clients busy, each with one
// request at a time.
const (
	Open   Mode = "open"
	Closed Mode = "closed"
)

// Arrivals is the shape of an open loop.
type Arrivals string

// Poisson has exponential gaps, like many independent users; Uniform places one request at random in each
// slot of 1/rate.
const (
	Poisson Arrivals = "poisson"
	Uniform Arrivals = "uniform"
)

// Route selects the endpoint.
type Route string

// The routes.
const (
	Chat        Route = "chat"
	Completions Route = "completions"
)

// Defaults and limits.
const (
	defaultConcurrency = 16               // clients of a closed loop
	defaultMaxInFlight = 4096             // requests of an open loop at one time
	defaultDuration    = 10 * time.Second // if neither Requests nor Duration is set
	DefaultTimeout     = 2 * time.Minute
	defaultPromptBytes = 256
	DefaultMaxTokens   = 64
	DefaultTTFT        = 2 * time.Second
	DefaultTPOT        = 50 * time.Millisecond

	bytesPerToken  = 4 // about, for English text; used only for PromptTokens
	maxConcurrency = 65_536
	maxRate        = 1e6
	maxPromptBytes = 64 << 20
	maxOutput      = 1 << 20
	maxTime        = 24 * time.Hour
)

// SLO holds the limits that a good request meets.
type SLO struct {
	TTFT time.Duration // from the intended send time to the first token
	TPOT time.Duration // mean gap after it; a request with one token meets it
}

// Config describes the load and its length. The zero value of every field but URL and Model means its default
// or "off".
type Config struct {
	URL    string // http(s)://host:port, without /v1
	Model  string
	APIKey string // never in a report

	Mode     Mode     // default Closed; Open if Rate is set
	Rate     float64  // requests per second of an open loop
	Arrivals Arrivals // of an open loop; default Poisson
	// clients of a closed loop, or most requests in flight of an open loop (later ones wait, and their
	// latency includes the wait)
	Concurrency int
	Requests    int           // measured requests; 0 = until Duration is over
	Duration    time.Duration // of the measurement, without Warmup; 0 = until Requests are sent
	Warmup      time.Duration // requests of this time are not measured

	PromptTokens int // 4 bytes each; PromptBytes wins
	PromptBytes  int
	MaxTokens    int
	IgnoreEOS    bool // ask for exactly MaxTokens (vllm, sglang, sim)
	Stream       bool
	Route        Route // default Chat

	Seed    uint64 // of arrivals and prompts; equal seeds send equal bytes
	Timeout time.Duration
	SLO     SLO
	PIDs    []int // processes whose CPU time is charged to the run (Linux); empty = none
	// gets each request that was sent, at its end; nil: nobody. It must be safe for concurrent use
	Record func(s *Sent)
}

// Sent is a request that was sent.
type Sent struct {
	At     time.Time
	Body   []byte // not to be kept
	Prompt int    // tokens by the engine's count; 0: it told none
	Output int    // tokens
}

// withDefaults sets the defaults of zero fields.
func (c Config) withDefaults() Config {
	if c.Mode == "" {
		c.Mode = Closed
		if c.Rate != 0 { // a negative rate is a fault of an open loop
			c.Mode = Open
		}
	}
	if c.Requests == 0 && c.Duration == 0 {
		c.Duration = defaultDuration
	}
	concurrency := defaultConcurrency
	if c.Mode == Open {
		concurrency = defaultMaxInFlight
	}
	c.Concurrency = cmp.Or(c.Concurrency, concurrency)
	c.Arrivals = cmp.Or(c.Arrivals, Poisson)
	c.PromptBytes = cmp.Or(c.PromptBytes, c.PromptTokens*bytesPerToken, defaultPromptBytes)
	c.MaxTokens = cmp.Or(c.MaxTokens, DefaultMaxTokens)
	c.Route = cmp.Or(c.Route, Chat)
	c.Timeout = cmp.Or(c.Timeout, DefaultTimeout)
	c.SLO.TTFT = cmp.Or(c.SLO.TTFT, DefaultTTFT)
	c.SLO.TPOT = cmp.Or(c.SLO.TPOT, DefaultTPOT)
	return c
}

// faults collects what is wrong with a configuration.
type faults []string

func (f *faults) check(ok bool, what string) {
	if !ok {
		*f = append(*f, what)
	}
}

// problem is the error that names the faults; nil without any.
func (f *faults) problem(message string) error {
	if len(*f) == 0 {
		return nil
	}
	return problem.New(problem.InvalidArgument, "%s", message).
		WithHint("correct the settings named above").WithDetails(*f...)
}

// Validate reports all faults of c at once; nil if c can run.
func (c Config) Validate() error {
	c = c.withDefaults()
	var f faults
	u, err := url.Parse(c.URL)
	f.check(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.User == nil &&
		(u.Path == "" || u.Path == "/") && u.RawQuery == "",
		"url: wanted http://HOST:PORT without a path")
	f.check(c.Model != "", "model: wanted the name that clients send")
	f.check(c.Mode == Open || c.Mode == Closed, "mode: wanted open | closed")
	f.check(c.Mode != Open || c.Rate > 0 && c.Rate <= maxRate,
		"rate: an open loop wants requests per second above 0 to 1000000")
	f.check(c.Mode != Closed || c.Rate == 0, "rate: a closed loop has no rate")
	f.check(c.Arrivals == Poisson || c.Arrivals == Uniform, "arrivals: wanted poisson | uniform")
	f.check(c.Concurrency > 0 && c.Concurrency <= maxConcurrency, "concurrency: wanted 1 to 65536")
	f.check(c.Requests >= 0, "requests: wanted 0 or more")
	f.check(c.Duration >= 0 && c.Duration <= maxTime && c.Warmup >= 0 && c.Warmup <= maxTime,
		"duration and warmup: wanted 0 to 24h")
	f.check(c.PromptBytes > 0 && c.PromptBytes <= maxPromptBytes, "prompt: wanted 1 byte to 64 MiB")
	f.check(c.MaxTokens > 0 && c.MaxTokens <= maxOutput, "max tokens: wanted 1 to 1048576")
	f.check(c.Route == Chat || c.Route == Completions, "route: wanted chat | completions")
	f.check(c.Timeout > 0 && c.Timeout <= maxTime, "timeout: wanted above 0 to 24h")
	f.check(c.SLO.TTFT > 0 && c.SLO.TPOT > 0, "slo: wanted times above 0")
	return f.problem("the load cannot be sent as asked")
}

// Defaults of Conversation. With the defaults of `dpserve up` they show the effect of a prefix cache within
// 20 s.
const (
	defaultSessionRate   = 4.0 // new sessions per second
	DefaultTurns         = 6
	DefaultSystemPrompts = 8
	DefaultSystemTokens  = 2000
	DefaultTurnTokens    = 300
	DefaultThink         = time.Second

	maxSessions      = 1 << 20
	maxTurns         = 10_000
	maxSystemPrompts = 65_536
	maxSystemBytes   = 1 << 30 // of all system prompts together, which stay in memory
	maxSessionTokens = maxPromptBytes / bytesPerToken / maxTurnFactor
)

// Conversation describes multi-turn load. Sessions begin as an open loop (Config.Rate is sessions per
// second). Each session picks one of the shared system prompts and sends its whole history in every turn:
// system prompt, user messages and received answers. A session is one user, so its turns never overlap. No
// field has a default; zero of SystemPrompts, Think and LongShare means none.
type Conversation struct {
	Sessions int
	Turns    int // of each session
	// number of different ones; a session takes number ⌊SystemPrompts·U^2.2⌋, so the first ones are popular
	SystemPrompts int
	SystemTokens  int // length of each, in tokens of 4 bytes
	TurnTokens    int // mean length of a user's message: a quarter of it and an exponential rest
	// mean of the exponential pause between the end of an answer and the next message
	Think time.Duration
	// share of sessions that open with a document in front of their first message, 0 to 1
	LongShare  float64
	LongTokens int // length of that document
}

// validate reports all faults of c, and of cfg for sessions. cfg has its defaults.
func (c *Conversation) validate(cfg *Config) error {
	var f faults
	f.check(c.Sessions > 0 && c.Sessions <= maxSessions, "sessions: wanted 1 to 1048576")
	f.check(c.Turns > 0 && c.Turns <= maxTurns, "turns: wanted 1 to 10000")
	f.check(c.SystemPrompts >= 0 && c.SystemPrompts <= maxSystemPrompts, "system prompts: wanted 0 to 65536")
	f.check(c.SystemPrompts == 0 || c.SystemTokens > 0 && c.SystemTokens <= maxSessionTokens,
		"system tokens: wanted 1 to 1677721")
	f.check(c.SystemPrompts*c.SystemTokens <= maxSystemBytes/bytesPerToken,
		"system prompts: wanted at most 1 GiB of them")
	f.check(c.TurnTokens > 0 && c.TurnTokens <= maxSessionTokens, "turn tokens: wanted 1 to 1677721")
	f.check(c.Think >= 0 && c.Think <= maxTime, "think: wanted 0 to 24h")
	f.check(c.LongShare >= 0 && c.LongShare <= 1, "long share: wanted 0 to 1")
	f.check(c.LongShare == 0 || c.LongTokens > 0 && c.LongTokens <= maxSessionTokens,
		"long tokens: wanted 1 to 1677721")
	f.check(cfg.Mode == Open, "mode: sessions begin as an open loop, give a rate of sessions per second")
	f.check(cfg.Route == Chat && cfg.Stream, "route: sessions are streamed chats")
	f.check(cfg.Requests == 0, "requests: sessions and turns say how many there are")
	return f.problem("the sessions cannot be played as asked")
}
