package loadgen

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"time"
)

// Numbers of the random streams of sessions, far from those of single prompts: each session and each system prompt has
// its own, so that neither the order of answers nor the length of another session changes what is said.
const (
	systemStream  = 1 << 32
	sessionStream = 1 << 40
)

// popularity is the exponent of the skew among system prompts: with 8 of them the first is taken by 39 % of sessions.
const popularity = 2.2

// script holds what all sessions of a run say; equal for equal seeds. Safe for concurrent use.
type script struct {
	talk  Conversation
	texts texts
	tail  []byte // of a body, behind the messages
	seed  uint64
	// systems are the first messages as JSON, systemBytes the length of their texts.
	systems     [][]byte
	systemBytes int
}

func newScript(cfg Config, talk Conversation) (*script, error) {
	tail, err := settingsOf(cfg)
	if err != nil {
		return nil, err
	}
	longest := max(talk.SystemTokens, talk.LongTokens+talk.TurnTokens*maxTurnFactor) * bytesPerToken
	s := &script{talk: talk, texts: newTexts(cfg.Seed, longest), tail: append([]byte("],"), tail[1:]...), seed: cfg.Seed}
	if talk.SystemPrompts > 0 {
		s.systemBytes = talk.SystemTokens * bytesPerToken
	}
	for i := range talk.SystemPrompts {
		r := rand.New(rand.NewPCG(cfg.Seed, systemStream+uint64(i)))
		s.systems = append(s.systems, message(nil, "system", s.texts.append(nil, r, s.systemBytes)))
	}
	return s, nil
}

// session is one user with the history of the conversation so far. Not safe for concurrent use.
type session struct {
	s       *script
	r       *rand.Rand
	number  int
	system  int    // index of its system prompt, -1 = none
	history []byte // a body without its tail
	bytes   int    // of all texts in history
	turn    int    // turns begun
}

// begin is session number n, from 0, before its first turn.
func (s *script) begin(n int) *session {
	x := &session{s: s, r: rand.New(rand.NewPCG(s.seed, sessionStream+uint64(n))), number: n, system: -1} //nolint:gosec // n is never negative
	x.history = []byte(`{"messages":[`)
	if share := x.r.Float64(); len(s.systems) > 0 {
		x.system = int(float64(len(s.systems)) * math.Pow(share, popularity))
		x.history = append(x.history, s.systems[x.system]...)
		x.bytes = s.systemBytes
	}
	return x
}

// id is what x-session-id carries.
func (x *session) id() string {
	return "bench-" + strconv.FormatUint(x.s.seed, 10) + "-" + strconv.Itoa(x.number)
}

// ask is the body of the next turn.
func (x *session) ask() []byte {
	tokens := min(0.25+0.75*x.r.ExpFloat64(), maxTurnFactor) * float64(x.s.talk.TurnTokens)
	size := max(1, int(tokens)) * bytesPerToken
	if x.turn == 0 && x.r.Float64() < x.s.talk.LongShare {
		size += x.s.talk.LongTokens * bytesPerToken
	}
	x.turn++
	x.say("user", x.s.texts.append(nil, x.r, size))
	return append(x.history[:len(x.history):len(x.history)], x.s.tail...)
}

// maxTurnFactor bounds a message, in multiples of its mean length; 1 of 600,000 is longer.
const maxTurnFactor = 10

// reply puts the answer into the history.
func (x *session) reply(text []byte) { x.say("assistant", text) }

func (x *session) say(role string, text []byte) {
	if x.history[len(x.history)-1] != '[' {
		x.history = append(x.history, ',')
	}
	x.history = message(x.history, role, text)
	x.bytes += len(text)
}

// think is the pause before the next turn.
func (x *session) think() time.Duration {
	return time.Duration(x.r.ExpFloat64() * float64(x.s.talk.Think))
}

// message appends a chat message as JSON. Bytes that are no text become U+FFFD.
func message(dst []byte, role string, text []byte) []byte {
	content, err := json.Marshal(string(text))
	if err != nil { // strings always marshal
		content = []byte(`""`)
	}
	dst = append(append(append(dst, `{"role":"`...), role...), `","content":`...)
	return append(append(dst, content...), '}')
}

// settingsOf is the JSON object of everything in a body but its prompt.
func settingsOf(cfg Config) ([]byte, error) {
	fields := map[string]any{"model": cfg.Model, "max_tokens": cfg.MaxTokens, "stream": cfg.Stream}
	if cfg.Stream {
		fields["stream_options"] = map[string]any{"include_usage": true}
	}
	if cfg.IgnoreEOS {
		fields["ignore_eos"] = true
	}
	settings, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("build the request: %w", err)
	}
	return settings, nil
}

// prompts makes request bodies: equal in shape, different in text from the first words on, so that no prefix cache helps,
// and equal for equal seeds.
type prompts struct {
	head, tail []byte
	texts      texts
	size       int
	seed       uint64
}

func newPrompts(cfg Config) (*prompts, error) {
	settings, err := settingsOf(cfg)
	if err != nil {
		return nil, err
	}
	p := &prompts{head: []byte(`{"prompt":"`), size: cfg.PromptBytes, seed: cfg.Seed}
	p.tail = append([]byte(`",`), settings[1:]...)
	if cfg.Route == Chat {
		p.head = []byte(`{"messages":[{"role":"user","content":"`)
		p.tail = append([]byte(`"}],`), settings[1:]...)
	}
	p.texts = newTexts(cfg.Seed, cfg.PromptBytes)
	return p, nil
}

// body is the whole body of request n.
func (p *prompts) body(n uint64) []byte {
	out := make([]byte, 0, len(p.head)+p.size+len(p.tail))
	out = p.texts.append(append(out, p.head...), rand.New(rand.NewPCG(p.seed, n)), p.size)
	return append(out, p.tail...)
}

// textStream tells the random stream of the text from those of the single prompts, which are numbered from 1.
const textStream = 0

const spareText = 64 << 10 // how far slices of the text may be apart

// texts are words for prompts: a tag that is drawn, then a slice of random words.
type texts struct{ words []byte }

// newTexts has texts of up to longest bytes.
func newTexts(seed uint64, longest int) texts {
	return texts{words(rand.New(rand.NewPCG(seed, textStream)), longest+spareText)}
}

// append appends a text of size bytes that r draws. Texts of different draws differ from their first bytes on.
func (t texts) append(dst []byte, r *rand.Rand, size int) []byte {
	tag := strconv.AppendUint(nil, r.Uint64()>>1, 36)
	tag = tag[:min(len(tag), size)]
	from := r.IntN(spareText)
	return append(append(dst, tag...), t.words[from:from+size-len(tag)]...)
}

// words is n bytes of lower-case words.
func words(r *rand.Rand, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte('a' + r.IntN(26)) //nolint:gosec // below 128
		if r.IntN(6) == 0 {
			out[i] = ' '
		}
	}
	return out
}
