package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/steptime"
)

// Version is the engine version that is imitated, as GET /version tells it.
const Version = "0.32.0"

// Defaults of Config.
const (
	defaultHost      = "127.0.0.1"
	defaultPort      = 8000
	defaultModel     = "sim"
	defaultKeepAlive = 5 * time.Second // idle connections are closed after it
	// from the last drained request to the exit; vLLM takes up to 10 s
	defaultLinger    = 500 * time.Millisecond
	defaultHandshake = 5 * time.Minute        // how long ranks of a group wait for each other
	deathDelay       = 600 * time.Millisecond // from the core's death to the exit of the process
	maxTopLogprobs   = 20
	maxInternalRanks = 1024
	maxGroupRanks    = 4096
)

// Config is one rank's process. Durations are wall time.
type Config struct {
	Host  string
	Port  int      // 0 = any free one
	Names []string // served model names, at least one; answers carry the first where the client sent none
	Root  string   // model source as /v1/models tells it; empty = the first name

	Model em.Config
	Seed  uint64 // of the texts

	Features
	ShutdownTimeout time.Duration
	KeepAlive       time.Duration
	Linger          time.Duration

	Group

	ReportedBlockSize int // what /metrics tells in place of Model.BlockSize; 0 = the truth

	KVEvents KVEvents
	Transfer KVTransfer
	Hashing  em.Hashing // of blocks

	Start

	Logger *slog.Logger // nil = silent; never sees prompts or texts
	// Listen and Dial replace the network (tests on memory transports); nil = net.
	Listen func(ctx context.Context, addr string) (net.Listener, error)
	Dial   func(ctx context.Context, addr string) (net.Conn, error)

	ownProcess
}

// ownProcess is what an engine can do with the process that it has for itself.
type ownProcess struct {
	kill   func()               // ends this very process without a trace; nil = only the server ends
	orphan func(port int) error // leaves a child behind that holds port; nil = not possible
	out    io.Writer            // lines of a slow load; nil = nowhere
}

// Features switches parts of the API.
type Features struct {
	APIKey              string // empty = open
	PromptTokensDetails bool   // usage.prompt_tokens_details
	ForceIncludeUsage   bool   // usage in every stream
	RequestIDHeaders    bool   // echo X-Request-Id
	DevMode             bool   // development routes
	AutoToolChoice      bool   // tools may be called; else such requests are refused
	Pooling             bool   // the model makes vectors of texts and generates none
}

// Group is the rank's place among others.
type Group struct {
	DPSize           int    // ranks of the group; 0 or 1 = uncoupled
	DPRank           int    // this rank
	RPCAddr          string // host:port of rank 0's meeting point, which it binds
	GroupKey         string // a secret of the group's ranks; "" = every caller is accepted
	SyncInterval     int    // steps between wave checks, equal on all ranks
	ExpertParallel   bool   // must be equal on all ranks
	TensorParallel   int    // must be equal on all ranks
	HandshakeTimeout time.Duration
	InternalLB       int // ranks behind this one port (attach tests); 0 = this process is one rank
	FirstRank        int // number of the first of them: other ports have the ranks before it
	// requests name a rank of this port by its number; else by its place behind this port, from 0
	GlobalIndex bool
	Shared      steptime.Shared // what the ranks do together in a step
}

// Start is what happens while the engine starts, and at fixed times after it.
type Start struct {
	Startup       time.Duration // before the port opens
	StartExit     bool          // fail while starting
	StartExitOnce string        // the same, but only while this file does not exist; it is created
	StartHang     bool          // never become ready
	Schedule      []Scheduled   // faults at fixed times after the start

	StartExitWhile string // as StartExit, but only while this file exists
}

// Scheduled is a fault at a fixed time.
type Scheduled struct {
	After time.Duration // since the port opened
	Fault Fault
}

// Default is an uncoupled rank on a free port at real speed.
func Default() Config {
	return Config{
		Host: defaultHost, Names: []string{defaultModel}, Model: em.Default(),
		KeepAlive: defaultKeepAlive, Linger: defaultLinger,
		Group: Group{
			SyncInterval: em.DefaultSyncInterval, TensorParallel: 1, HandshakeTimeout: defaultHandshake,
		},
		Features: Features{PromptTokensDetails: true, AutoToolChoice: true},
		KVEvents: defaultKVEvents(), Transfer: defaultKVTransfer(),
	}
}

// Validate reports the first setting that cannot work.
func (c *Config) Validate() error {
	switch {
	case len(c.Names) == 0:
		return fmt.Errorf("no served model name: give --served-model-name one")
	case c.DPSize < 0 || c.DPSize > maxGroupRanks || c.DPRank < 0 || c.DPRank >= max(1, c.DPSize):
		return fmt.Errorf("data parallel rank %d of %d: the rank must be in [0, size), the size at most %d",
			c.DPRank, c.DPSize, maxGroupRanks)
	case c.DPSize > 1 && c.RPCAddr == "":
		return fmt.Errorf("a group of %d ranks has no meeting point: give --data-parallel-rpc-port", c.DPSize)
	case c.InternalLB < 0 || c.InternalLB > maxInternalRanks:
		return fmt.Errorf("%d internal ranks: at most %d are possible", c.InternalLB, maxInternalRanks)
	case c.FirstRank < 0 || c.FirstRank+c.InternalLB > maxGroupRanks:
		return fmt.Errorf("internal ranks from %d on: at most %d are possible", c.FirstRank, maxGroupRanks)
	case c.InternalLB > 0 && c.DPSize > 1:
		return fmt.Errorf("internal ranks and a data parallel rank exclude each other: drop one")
	case c.SyncInterval < 1:
		return fmt.Errorf("dp sync interval is %d: it must be at least 1", c.SyncInterval)
	}
	for _, s := range c.Schedule {
		if err := s.Fault.validate(); err != nil {
			return err
		}
	}
	if err := errors.Join(c.KVEvents.validate(), c.Transfer.validate()); err != nil {
		return err
	}
	if c.KVEvents.active() && !c.Model.PrefixCaching {
		return fmt.Errorf("kv events need prefix caching: drop --no-enable-prefix-caching or the events")
	}
	return c.Model.Validate()
}

func (c *Config) listen(ctx context.Context, addr string) (net.Listener, error) {
	if c.Listen != nil {
		return c.Listen(ctx, addr)
	}
	var lc net.ListenConfig
	return lc.Listen(ctx, "tcp", addr)
}

func (c *Config) dial(ctx context.Context, addr string) (net.Conn, error) {
	if c.Dial != nil {
		return c.Dial(ctx, addr)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

func (c *Config) reportedBlockSize() int { return cmp.Or(c.ReportedBlockSize, c.Model.BlockSize) }

func (c *Config) lockstep() bool { return c.DPSize > 1 }

// ranks is the number of engine cores in this process.
func (c *Config) ranks() int { return max(1, c.InternalLB) }

// rankNumber is the number of the rank at a place behind this port, from 0 on.
func (c *Config) rankNumber(place int) int {
	if c.InternalLB > 0 {
		return c.FirstRank + place
	}
	return c.DPRank
}

// firstIndex is the lowest number by which requests name a rank of this port.
func (c *Config) firstIndex() int {
	if c.GlobalIndex {
		return c.FirstRank
	}
	return 0
}

// scaled is d shortened by the time scale: a fast engine dies and drains fast too.
func (c *Config) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) / max(1, c.Model.Speed))
}

// groupConfig is the shape of the group that rank 0 coordinates.
func (c *Config) groupConfig() em.GroupConfig {
	return em.GroupConfig{
		Ranks: c.DPSize, SyncInterval: c.SyncInterval, MinStep: em.MinWallStep, Shared: c.Shared,
		Speed: c.Model.Speed,
	}
}

// fingerprint is vllm-<version>[-dp<N>]-<8 hex>, equal for equal configurations, so on all ranks of a group.
func (c *Config) fingerprint() string {
	h := fnv.New32a()
	_, _ = fmt.Fprint(h, c.Names, c.Root, c.Model.BlockSize, c.Model.MaxModelLen, c.Model.MaxSeqs,
		c.TensorParallel, c.Seed)
	dp := ""
	if n := max(c.DPSize, c.InternalLB); n > 1 {
		dp = "-dp" + strconv.Itoa(n)
	}
	return fmt.Sprintf("vllm-%s%s-%08x", Version, dp, h.Sum32())
}

// collectiveHash covers what must be equal on all ranks because it shapes the collectives.
func (c *Config) collectiveHash() uint64 {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, c.DPSize, c.ExpertParallel, c.TensorParallel, c.SyncInterval)
	return h.Sum64()
}

// settings is the engine's configuration as request checks and answer writers read it. Only its adapters
// change.
type settings struct {
	*Config
	fingerprint string
	adapters    *adapters
}

func (c *Config) settings() *settings {
	return &settings{Config: c, fingerprint: c.fingerprint(), adapters: &adapters{}}
}

// knowsModel refuses a model that is not served; "" is the first one.
func (s *settings) knowsModel(name string) *apiError {
	if name == "" || slices.Contains(s.Names, name) || s.adapters.has(name) {
		return nil
	}
	return &apiError{
		status: 404, kind: "NotFoundError", param: "model",
		message: "The model `" + name + "` does not exist. Valid aliases: " + strings.Join(s.Names, ", ") +
			".",
	}
}
