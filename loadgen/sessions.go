package loadgen

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// RunSessions plays the sessions of talk and reports what their users saw: Run for conversations. Of cfg, Rate and Arrivals
// are those of sessions (Rate 0: DefaultSessionRate), Concurrency is the most sessions at one time, Duration (0 = no limit) ends the
// measurement although sessions go on, Warmup is time at the beginning that is not measured; Mode, Requests and the prompt's
// size are not used. A session whose turn fails ends there, since it has no answer to go on with.
func RunSessions(ctx context.Context, cfg Config, talk Conversation) (*Report, error) {
	cfg, err := sessionConfig(cfg, &talk)
	if err != nil {
		return nil, err
	}
	c, err := newClient(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer c.close()
	out := newCollector(cfg)
	p, err := newPlay(cfg, talk, c.turn, out.add)
	if err != nil {
		return nil, err
	}
	p.nap, p.started = exactSleep, time.Now()
	before := cpuTime(cfg.PIDs)
	p.drive(ctx)
	report := out.report(cfg, p.measured())
	report.Sessions = p.report(out)
	report.PromptBytes = 0 // they have many lengths
	report.CPU = charge(before, cpuTime(cfg.PIDs), time.Since(p.started), out.all())
	return report, context.Cause(ctx)
}

// sessionConfig fills in the defaults of a run of sessions and checks both halves of it.
func sessionConfig(cfg Config, talk *Conversation) (Config, error) {
	orDefault(&cfg.Rate, DefaultSessionRate)
	duration := cfg.Duration
	cfg = cfg.withDefaults()
	cfg.Duration = duration
	if err := cfg.Validate(); err != nil {
		return cfg, err
	}
	return cfg, talk.validate(&cfg)
}

// turner sends one turn of a session and waits for its end.
type turner func(ctx context.Context, body []byte, session string, intended time.Time) *sample

// play is a run of sessions in progress.
type play struct {
	run    // its sender is not used
	script *script
	oracle *oracle
	turn   turner

	begun, whole, cut atomic.Int64 // sessions: begun, played to their last turn, ended by a failure
}

func newPlay(cfg Config, talk Conversation, turn turner, keep func(*sample, bool)) (*play, error) {
	s, err := newScript(cfg, talk)
	if err != nil {
		return nil, err
	}
	return &play{run: run{cfg: cfg, keep: keep}, script: s, oracle: newOracle(talk.SystemPrompts), turn: turn}, nil
}

// drive begins sessions at the times of the schedule and waits for the last of them.
func (p *play) drive(ctx context.Context) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, p.cfg.Concurrency)
	plan := newSchedule(p.cfg)
	for n := range p.script.talk.Sessions {
		at := p.started.Add(plan.next())
		if p.over(at) || p.waitUntil(ctx, at) != nil || !acquire(ctx, slots) {
			break
		}
		wg.Go(func() {
			p.session(ctx, n, at)
			<-slots
		})
	}
	wg.Wait()
}

// over says that a turn at t comes after the measurement, so that nobody waits for it.
func (p *play) over(t time.Time) bool {
	return p.cfg.Duration > 0 && t.Sub(p.measured()) >= p.cfg.Duration
}

// session plays session n, whose user comes at the given time.
func (p *play) session(ctx context.Context, n int, at time.Time) {
	x := p.script.begin(n)
	p.begun.Add(1)
	known := 0 // tokens with which the next prompt begins and that were sent or answered before
	for {
		s := p.one(ctx, x, at, &known)
		switch {
		case s.failure == failureStopped:
			return
		case s.failure != "":
			p.cut.Add(1)
			return
		case x.turn >= p.script.talk.Turns:
			p.whole.Add(1)
			return
		}
		x.reply(s.answer)
		if !wait(ctx, x.think()) {
			return
		}
		if at = time.Now(); p.over(at) {
			return
		}
	}
}

// one plays a turn. known is what the perfect cache holds of it, brought up to date for the next one.
func (p *play) one(ctx context.Context, x *session, at time.Time, known *int) *sample {
	first := x.turn == 0
	body := x.ask()
	shared := first && p.oracle.knew(x.system)
	s := p.turn(ctx, body, x.id(), at)
	if shared {
		*known = s.usage.Prompt * p.script.systemBytes / max(1, x.bytes)
	}
	s.reusable = reusable(*known, s.usage.Prompt)
	*known = s.usage.Prompt + s.tokens() - 1
	p.keep(s, !at.Before(p.measured()))
	return s
}

// wait pauses for d; false if ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// report is the part that only sessions have.
func (p *play) report(c *collector) *SessionReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	talk := &p.script.talk
	r := &SessionReport{
		Sessions: talk.Sessions, Turns: talk.Turns, SystemPrompts: talk.SystemPrompts, SystemTokens: talk.SystemTokens,
		TurnTokens: talk.TurnTokens, ThinkMs: ms(talk.Think), LongShare: talk.LongShare, LongTokens: talk.LongTokens,
		Begun: int(p.begun.Load()), Whole: int(p.whole.Load()), Cut: int(p.cut.Load()), ReusableTokens: c.usage.reusable,
	}
	if c.usage.prompt > 0 {
		r.OracleShare = float64(c.usage.reusable) / float64(c.usage.prompt)
	}
	if c.usage.reusable > 0 {
		r.OfOracle = float64(c.usage.cached) / float64(c.usage.reusable)
	}
	return r
}

// oracleBlock is the number of tokens of a block of the perfect cache: vLLM's and dpserve's default. Engines reuse whole
// blocks only, so a bound that counts single tokens would be out of reach.
const oracleBlock = 16

// oracle tells what one cache without limit, behind a router that always finds it, would have reused of each prompt: the
// longest prefix that was sent before, in whole blocks, at most all but one token. A later turn finds the prompt of the
// turn before it and the answer but for its last token, which no engine computes; a first turn finds its system prompt if
// any session has sent that before. It counts in the tokens that the engine reports; the share of a system prompt in its
// first prompt is taken by bytes. What earlier runs left in the engines it does not know.
type oracle struct {
	mu   sync.Mutex
	sent []bool // per system prompt
}

func newOracle(systemPrompts int) *oracle { return &oracle{sent: make([]bool, systemPrompts)} }

// knew is called as a first turn is sent: whether its system prompt was sent before. -1 is none.
func (o *oracle) knew(system int) bool {
	if system < 0 {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.sent[system]
	o.sent[system] = true
	return before
}

// reusable is what the perfect cache reuses of a prompt, both in tokens.
func reusable(prefix, prompt int) int {
	return max(0, min(prefix, prompt-1)) / oracleBlock * oracleBlock
}
