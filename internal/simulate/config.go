// Package simulate plays a trace of requests against simulated engines behind the real Router, on virtual
// time: what a routing policy is worth on a day of traffic, in seconds and without noise. The engines are
// enginemodel's, by the cost model of steptime; the Routers, and with prefill ranks their PairRouter, hear
// what an ingress would tell them. The same workload and seed give the same result. It is pure: the command
// reads the files and plays a Study's runs beside each other.
//
// It leaves out what lies between: the network, the time of a decision, engines that answer with errors, and
// the first contact of a pair. A prompt's KV has the link for itself.
package simulate

import (
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/steptime"
	"github.com/dpserve/dpserve/routing"
)

// Config is the shape of a run.
type Config struct {
	Pool
	Prefill Pool // ranks that only compute prompts, for those of Pool; without Ranks there are none
	Pair    routing.PairRule
	// of the prefill ranks; nil: that of the others
	PrefillPolicy func() (routing.Policy, error)
	Transfer
	Queue

	Ingresses int           // requests come to them in turn, each has Routers of its own
	Lag       time.Duration // how old a rank's records are when the ingresses hear of them
	Seed      uint64        // of the Routers
	Goals     routing.Goals
	Faults    []Fault

	ClockSkew   []time.Duration // by rank: how far its own clock is ahead; ranks beyond the list: 0
	ClockJump   []time.Duration // by rank: by how much its clock jumps at ClockJumpAt; likewise
	ClockJumpAt time.Duration   //
	WithoutHits int             // of the first of the ranks nobody knows what they hold
	// changes what a rank tells before an ingress hears of it; nil = nothing is changed
	Report func(*routing.Event)

	// called with the requests that came: after each, and while ranks work; an error ends the run; nil = not
	// called
	Each func(sent int) error
}

// Pool is ranks that are alike.
type Pool struct {
	Ranks         int
	Engine        enginemodel.Config // its blocks have BlockSize tokens
	Shared        steptime.Shared    // of a lockstep group: what its ranks do together in a step
	Slots         int                // requests per rank, more wait at their ingress; 0 = without limit
	BusyThreshold *float64           // of the application; nil = off
}

// Transfer is how long a prompt is on its way from a prefill rank to a decode rank.
type Transfer struct {
	HandOver time.Duration // from the end of the prefill leg to the decode rank
	PerToken time.Duration
}

// Queue bounds what waits at an ingress, and how often a request is tried.
type Queue struct {
	Most     int           // requests; 0 = without limit
	Wait     time.Duration // 0 = without limit
	Attempts int           // ranks that a request may be lost with
	Cut      bool          // an answer that has begun ends with its rank
}

// Fault is a rank that dies, or becomes slow.
type Fault struct {
	At      time.Duration
	Rank    int
	Prefill bool          // a rank of the prefill pool
	Factor  float64       // its steps take so many times as long; 0 = it dies
	For     time.Duration // then it is as before, or starts again; 0 = never
}

// never is a time that does not come.
const never = enginemodel.Never

// Engine is a rank of the reference model: steps of 8,192 tokens, room for 699,392.
func Engine() enginemodel.Config {
	e := enginemodel.Default()
	e.Blocks = e.Blocks * e.BlockSize / BlockSize
	e.BlockSize, e.MaxModelLen = BlockSize, e.Blocks*BlockSize
	return e
}

// Default is eight such ranks, and one ingress.
func Default() Config {
	return Config{
		Pool: Pool{Ranks: 8, Engine: Engine()}, Ingresses: 1, Queue: Queue{Attempts: 3},
		// Qwen3-32B over 25 Gbit/s, as routing's costs of pairs have it
		Transfer: Transfer{HandOver: 5 * time.Millisecond, PerToken: 83886 * time.Nanosecond},
		Goals:    routing.DefaultGoals(),
	}
}

// Pooled is one rank as fast as all together, with their memory: first come first served, from one cache.
func (c Config) Pooled() Config {
	n := c.Ranks + c.Prefill.Ranks
	e := &c.Engine
	e.Blocks, e.MaxSeqs = n*e.Blocks, n*e.MaxSeqs
	e.Speed, e.FixedStep = float64(n)*e.Speed, e.FixedStep/time.Duration(n)
	e.Lockstep, e.Transfer = false, false
	c.Pool = Pool{Ranks: 1, Engine: *e}
	c.Prefill, c.Faults = Pool{}, nil
	return c
}

// fits says whether a rank can compute a request. Engines refuse the others.
func (c *Config) fits(r *Request) bool { return r.Prompt+r.Output <= c.Engine.MaxModelLen }

func (c *Config) report(e *routing.Event) {
	if c.Report != nil {
		c.Report(e)
	}
}

// clock is what a rank's own clock shows at now.
func (c *Config) clock(rank int, now time.Duration) time.Duration {
	at := clockOrigin + now
	if rank < len(c.ClockSkew) {
		at += c.ClockSkew[rank]
	}
	if rank < len(c.ClockJump) && now >= c.ClockJumpAt {
		at += c.ClockJump[rank]
	}
	return at
}
