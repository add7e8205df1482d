package loadgen

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"strconv"
	"time"
)

// Numbers of the random streams of sessions, far from those of single prompts. Each session and each system
// prompt has its own stream, so that the texts do not depend on the order of answers or the length of other
// sessions.
const (
	systemStream  = 1 << 32
	sessionStream = 1 << 40
)

// popularity is the exponent of the skew among system prompts: with 8 of them, 39 % of the sessions take the
// first.
const popularity = 2.2

// script generates the texts of all sessions of a run; equal seeds give equal texts. Safe for concurrent use.
type script struct {
	conversation Conversation
	texts        texts
	tail         []byte // of a body, after the messages
	seed         uint64
	// systems are the first messages as JSON; systemBytes is the length of their texts.
	systems     [][]byte
	systemBytes int
}

func newScript(cfg Config, conversation Conversation) *script {
	longest := max(conversation.SystemTokens,
		conversation.LongTokens+conversation.TurnTokens*maxTurnFactor) * bytesPerToken
	s := &script{
		conversation: conversation, texts: newTexts(cfg.Seed, longest),
		tail: append([]byte("],"), encodeSettings(cfg)[1:]...), seed: cfg.Seed,
	}
	if conversation.SystemPrompts > 0 {
		s.systemBytes = conversation.SystemTokens * bytesPerToken
	}
	for i := range conversation.SystemPrompts {
		r := rand.New(rand.NewPCG(cfg.Seed, systemStream+uint64(i)))
		s.systems = append(s.systems, message(nil, "system", s.texts.append(nil, r, s.systemBytes)))
	}
	return s
}

// session is one user with the conversation's history. Not safe for concurrent use.
type session struct {
	s       *script
	r       *rand.Rand
	number  int
	system  int    // index of its system prompt, -1 = none
	history []byte // a body without its tail
	bytes   int    // of all texts in history
	turn    int    // turns begun
}

// begin returns session number n, from 0, before its first turn.
func (s *script) begin(n int) *session {
	r := rand.New(rand.NewPCG(s.seed, sessionStream+uint64(n)))
	x := &session{s: s, r: r, number: n, system: -1}
	x.history = []byte(`{"messages":[`)
	if share := x.r.Float64(); len(s.systems) > 0 {
		x.system = int(float64(len(s.systems)) * math.Pow(share, popularity))
		x.history = append(x.history, s.systems[x.system]...)
		x.bytes = s.systemBytes
	}
	return x
}

// id returns the value of x-session-id.
func (x *session) id() string {
	return "bench-" + strconv.FormatUint(x.s.seed, 10) + "-" + strconv.Itoa(x.number)
}

// nextBody returns the body of the next turn.
func (x *session) nextBody() []byte {
	tokens := min(0.25+0.75*x.r.ExpFloat64(), maxTurnFactor) * float64(x.s.conversation.TurnTokens)
	size := max(1, int(tokens)) * bytesPerToken
	if x.turn == 0 && x.r.Float64() < x.s.conversation.LongShare {
		size += x.s.conversation.LongTokens * bytesPerToken
	}
	x.turn++
	x.addMessage("user", x.s.texts.append(nil, x.r, size))
	return append(x.history[:len(x.history):len(x.history)], x.s.tail...)
}

// maxTurnFactor bounds the length of a message, in multiples of the mean; it cuts 1 of 600,000.
const maxTurnFactor = 10

// addAnswer appends the answer to the history.
func (x *session) addAnswer(text []byte) { x.addMessage("assistant", text) }

func (x *session) addMessage(role string, text []byte) {
	if x.history[len(x.history)-1] != '[' {
		x.history = append(x.history, ',')
	}
	x.history = message(x.history, role, text)
	x.bytes += len(text)
}

// thinkTime returns the pause before the next turn.
func (x *session) thinkTime() time.Duration {
	return time.Duration(x.r.ExpFloat64() * float64(x.s.conversation.Think))
}

// message appends a chat message as JSON. Invalid UTF-8 becomes U+FFFD.
func message(dst []byte, role string, text []byte) []byte {
	content, _ := json.Marshal(string(text)) // strings always marshal
	dst = append(append(append(dst, `{"role":"`...), role...), `","content":`...)
	return append(append(dst, content...), '}')
}

// encodeSettings returns a request body without its prompt, as a JSON object.
func encodeSettings(cfg Config) []byte {
	fields := map[string]any{"model": cfg.Model, "max_tokens": cfg.MaxTokens, "stream": cfg.Stream}
	if cfg.Stream {
		fields["stream_options"] = map[string]any{"include_usage": true}
	}
	if cfg.IgnoreEOS {
		fields["ignore_eos"] = true
	}
	settings, _ := json.Marshal(fields) // texts, numbers and booleans always marshal
	return settings
}

// prompts makes request bodies of equal shape. Their texts differ from the first words, so that no prefix
// cache helps, and are equal for equal seeds.
type prompts struct {
	head, tail []byte
	texts      texts
	size       int
	seed       uint64
}

func newPrompts(cfg Config) *prompts {
	settings := encodeSettings(cfg)
	p := &prompts{head: []byte(`{"prompt":"`), size: cfg.PromptBytes, seed: cfg.Seed}
	p.tail = append([]byte(`",`), settings[1:]...)
	if cfg.Route == Chat {
		p.head = []byte(`{"messages":[{"role":"user","content":"`)
		p.tail = append([]byte(`"}],`), settings[1:]...)
	}
	p.texts = newTexts(cfg.Seed, cfg.PromptBytes)
	return p
}

// body returns the complete body of request n.
func (p *prompts) body(n uint64) []byte {
	out := make([]byte, 0, len(p.head)+p.size+len(p.tail))
	out = p.texts.append(append(out, p.head...), rand.New(rand.NewPCG(p.seed, n)), p.size)
	return append(out, p.tail...)
}

// textStream is the number of the text's random stream; single prompts have numbers from 1.
const textStream = 0

const spareText = 64 << 10 // how far slices of the text may be apart

// texts makes prompt texts: a random tag, then a slice of random words.
type texts struct{ words []byte }

// newTexts makes texts of up to longest bytes.
func newTexts(seed uint64, longest int) texts {
	return texts{randomWords(rand.New(rand.NewPCG(seed, textStream)), longest+spareText)}
}

// append appends a text of size bytes that r selects. Texts of different draws differ from their first bytes.
func (t texts) append(dst []byte, r *rand.Rand, size int) []byte {
	tag := strconv.AppendUint(nil, r.Uint64()>>1, 36)
	tag = tag[:min(len(tag), size)]
	from := r.IntN(spareText)
	return append(append(dst, tag...), t.words[from:from+size-len(tag)]...)
}

// randomWords returns n bytes of lower-case words.
func randomWords(r *rand.Rand, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte('a' + r.IntN(26))
		if r.IntN(6) == 0 {
			out[i] = ' '
		}
	}
	return out
}
