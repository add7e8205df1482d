package loadgen

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/pause"
)

// RunSessions plays the sessions of conversation and reports what their users measured. Of cfg, Rate and
// Arrivals apply to sessions (Rate 0: defaultSessionRate), Concurrency is the most sessions at one time,
// Duration (0 = no limit) ends the measurement although sessions continue, Warmup is the time at the start
// that is not measured. Mode, Requests and the prompt's size are not used. A session ends at a failed turn,
// because it has no answer to continue with.
func RunSessions(ctx context.Context, cfg Config, conversation Conversation) (*Report, error) {
	cfg, err := sessionConfig(cfg, &conversation)
	if err != nil {
		return nil, err
	}
	c, err := newClient(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer c.close()
	out := newCollector(cfg)
	p := newSessionRun(cfg, conversation, c.turn, out.add)
	p.sleep, p.started = exactSleep, time.Now()
	before := cpuTime(cfg.PIDs)
	p.drive(ctx)
	report := out.report(cfg, p.measureStart())
	report.Sessions = p.report(out)
	report.PromptBytes = 0 // prompts have many lengths
	report.CPU = chargeCPU(before, cpuTime(cfg.PIDs), time.Since(p.started), out.all())
	return report, context.Cause(ctx)
}

// sessionConfig sets the defaults of a run of sessions and validates cfg and conversation.
func sessionConfig(cfg Config, conversation *Conversation) (Config, error) {
	cfg.Rate = cmp.Or(cfg.Rate, defaultSessionRate)
	duration := cfg.Duration
	cfg = cfg.withDefaults()
	cfg.Duration = duration
	if err := cfg.Validate(); err != nil {
		return cfg, err
	}
	return cfg, conversation.validate(&cfg)
}

// turnSender sends one turn of a session and waits for its end.
type turnSender func(ctx context.Context, body []byte, session string, intended time.Time) *sample

// sessionRun is a run of sessions in progress.
type sessionRun struct {
	run    // run.do is not used
	script *script
	oracle *oracle
	turn   turnSender

	begun, whole, cut atomic.Int64 // sessions: begun, played to their last turn, ended by a failure
}

func newSessionRun(cfg Config, conversation Conversation, turn turnSender,
	record func(*sample, bool),
) *sessionRun {
	return &sessionRun{
		run: run{cfg: cfg, record: record}, script: newScript(cfg, conversation),
		oracle: newOracle(conversation.SystemPrompts), turn: turn,
	}
}

// drive starts sessions at the times of the schedule and waits for the last one.
func (p *sessionRun) drive(ctx context.Context) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, p.cfg.Concurrency)
	plan := newSchedule(p.cfg)
	for n := range p.script.conversation.Sessions {
		at := p.started.Add(plan.next())
		if p.isOver(at) || p.waitUntil(ctx, at) != nil || !acquire(ctx, slots) {
			break
		}
		wg.Go(func() {
			p.session(ctx, n, at)
			<-slots
		})
	}
	wg.Wait()
}

// isOver reports whether a turn at t comes after the measurement; such a turn is not sent.
func (p *sessionRun) isOver(t time.Time) bool {
	return p.cfg.Duration > 0 && t.Sub(p.measureStart()) >= p.cfg.Duration
}

// session plays session n, whose first turn is due at the given time.
func (p *sessionRun) session(ctx context.Context, n int, at time.Time) {
	x := p.script.begin(n)
	p.begun.Add(1)
	known := 0 // tokens of the next prompt's prefix that were sent or answered before
	for {
		s := p.sendOne(ctx, x, at, &known)
		switch {
		case s.failure == failureStopped:
			return
		case s.failure != "":
			p.cut.Add(1)
			return
		case x.turn >= p.script.conversation.Turns:
			p.whole.Add(1)
			return
		}
		x.addAnswer(s.answer)
		if pause.For(ctx, x.thinkTime()) != nil {
			return
		}
		if at = time.Now(); p.isOver(at) {
			return
		}
	}
}

// sendOne plays a turn. known is the length of the prefix that an unlimited cache holds; sendOne updates it
// for the next turn.
func (p *sessionRun) sendOne(ctx context.Context, x *session, at time.Time, known *int) *sample {
	first := x.turn == 0
	body := x.nextBody()
	shared := first && p.oracle.markSent(x.system)
	s := p.turn(ctx, body, x.id(), at)
	if shared {
		*known = s.usage.Prompt * p.script.systemBytes / max(1, x.bytes)
	}
	s.reusable = reusableTokens(*known, s.usage.Prompt)
	*known = s.usage.Prompt + s.tokens() - 1
	p.record(s, !at.Before(p.measureStart()))
	return s
}

// report returns the part of the report that only sessions have.
func (p *sessionRun) report(c *collector) *SessionReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	conversation := &p.script.conversation
	r := &SessionReport{
		Sessions: conversation.Sessions, Turns: conversation.Turns, SystemPrompts: conversation.SystemPrompts,
		SystemTokens: conversation.SystemTokens,
		TurnTokens:   conversation.TurnTokens, ThinkMs: toMillis(conversation.Think),
		LongShare: conversation.LongShare, LongTokens: conversation.LongTokens,
		Begun: int(p.begun.Load()), Whole: int(p.whole.Load()), Cut: int(p.cut.Load()),
		ReusableTokens: c.usage.reusable,
	}
	if c.usage.prompt > 0 {
		r.OracleShare = float64(c.usage.reusable) / float64(c.usage.prompt)
	}
	if c.usage.reusable > 0 {
		r.OfOracle = float64(c.usage.cached) / float64(c.usage.reusable)
	}
	return r
}

// oracleBlock is the block size of the unlimited cache in tokens: the default of vLLM and dpserve. Engines
// reuse only whole blocks, so a bound in single tokens would be out of reach.
const oracleBlock = 16

// oracle computes how much of each prompt one unlimited cache, behind a router that always finds it, would
// reuse: the longest prefix that was sent before, in whole blocks, at most all but one token. A later turn
// finds the previous turn's prompt and its answer without the last token, which no engine computes. A first
// turn finds its system prompt if any session has sent it before. It counts in the tokens that the engine
// reports; the share of a system prompt in its first prompt is estimated by bytes. It does not know blocks
// that earlier runs left in the engines.
type oracle struct {
	mu   sync.Mutex
	sent []bool // per system prompt
}

func newOracle(systemPrompts int) *oracle { return &oracle{sent: make([]bool, systemPrompts)} }

// markSent records a first turn's system prompt (-1 is none) and reports whether it was sent before.
func (o *oracle) markSent(system int) bool {
	if system < 0 {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.sent[system]
	o.sent[system] = true
	return before
}

// reusableTokens returns how many tokens of a prompt the unlimited cache reuses; both arguments are in
// tokens.
func reusableTokens(prefix, prompt int) int {
	return max(0, min(prefix, prompt-1)) / oracleBlock * oracleBlock
}
