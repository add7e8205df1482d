package loadgen

import (
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// Defaults of Conversation: together with the defaults of `dpserve up` they show within 20 s what a prefix cache is worth.
const (
	DefaultSessions      = 40
	DefaultSessionRate   = 4.0 // new sessions per second
	DefaultTurns         = 6
	DefaultSystemPrompts = 8
	DefaultSystemTokens  = 2000
	DefaultTurnTokens    = 300
	DefaultThink         = time.Second

	maxSessions      = 1 << 20
	maxTurns         = 10_000
	maxSystemPrompts = 65_536
	maxSystemBytes   = 1 << 30 // of all system prompts, which stay in memory
	maxSessionTokens = maxPromptBytes / bytesPerToken / maxTurnFactor
)

// Conversation is the shape of multi-turn load. Sessions begin as an open loop (Config.Rate is sessions per second). Each
// picks one of the shared system prompts, then sends its whole history in every turn: system prompt, its own messages,
// the answers it got. A session is one user, so its turns never overlap. No field has a default; zero of SystemPrompts,
// Think and LongShare means none.
type Conversation struct {
	Sessions      int
	Turns         int           // of each session
	SystemPrompts int           // how many different ones there are; number ⌊SystemPrompts·U^2.2⌋ is taken, so the first ones are popular
	SystemTokens  int           // length of each, in tokens of 4 bytes
	TurnTokens    int           // mean length of a user's message: a quarter of it and an exponential rest
	Think         time.Duration // mean of the exponential pause between the end of an answer and the next message
	LongShare     float64       // share of sessions that open with a document in front of their first message, 0 to 1
	LongTokens    int           // length of that document
}

// validate names everything that is wrong with c, and with what cfg says beside it; cfg has its defaults.
func (c *Conversation) validate(cfg *Config) error {
	var bad []string
	check := func(ok bool, what string) {
		if !ok {
			bad = append(bad, what)
		}
	}
	check(c.Sessions > 0 && c.Sessions <= maxSessions, "sessions: wanted 1 to 1048576")
	check(c.Turns > 0 && c.Turns <= maxTurns, "turns: wanted 1 to 10000")
	check(c.SystemPrompts >= 0 && c.SystemPrompts <= maxSystemPrompts, "system prompts: wanted 0 to 65536")
	check(c.SystemPrompts == 0 || c.SystemTokens > 0 && c.SystemTokens <= maxSessionTokens, "system tokens: wanted 1 to 1677721")
	check(c.SystemPrompts*c.SystemTokens <= maxSystemBytes/bytesPerToken, "system prompts: wanted at most 1 GiB of them")
	check(c.TurnTokens > 0 && c.TurnTokens <= maxSessionTokens, "turn tokens: wanted 1 to 1677721")
	check(c.Think >= 0 && c.Think <= maxTime, "think: wanted 0 to 24h")
	check(c.LongShare >= 0 && c.LongShare <= 1, "long share: wanted 0 to 1")
	check(c.LongShare == 0 || c.LongTokens > 0 && c.LongTokens <= maxSessionTokens, "long tokens: wanted 1 to 1677721")
	check(cfg.Mode == Open, "mode: sessions begin as an open loop, give a rate of sessions per second")
	check(cfg.Route == Chat && cfg.Stream, "route: sessions are streamed chats")
	check(cfg.Requests == 0, "requests: sessions and turns say how many there are")
	if len(bad) == 0 {
		return nil
	}
	return problem.New(problem.InvalidArgument, "the sessions cannot be played as asked").
		WithHint("correct the settings named above").WithDetails(bad...)
}
