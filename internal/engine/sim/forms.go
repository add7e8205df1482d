package sim

import (
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"strings"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// form is how a generation route writes its answers.
type form uint8

const (
	formOpenAI form = iota // completions and chats
	formTokens             // token ids in, token ids out
	formResponses
	formMessages
)

// reader returns how the body of a generation route is read, and how the ids of its requests begin.
func reader(path string) (read func(*fields, *settings) (*plan, *apiError), prefix string) {
	switch strings.TrimSuffix(path, "/render") {
	case "/v1/chat/completions":
		return readChat, "chatcmpl-"
	case "/inference/v1/generate":
		return readTokens, "generate-tokens-"
	case "/v1/responses":
		return readResponses, "resp_"
	case "/v1/messages":
		return readMessages, "chatcmpl-"
	default:
		return readCompletion, "cmpl-"
	}
}

// withMembers returns a body with other members: those of add that are not null.
func withMembers(f *fields, add map[string]json.RawMessage) *fields {
	out := &fields{members: maps.Clone(f.members)}
	for name, raw := range add {
		if len(raw) > 0 {
			out.members[name] = raw
		}
	}
	return out
}

// readTokens checks the body of /inference/v1/generate.
func readTokens(f *fields, s *settings) (*plan, *apiError) {
	if !f.has("token_ids") {
		f.refuse("token_ids", msgRequired)
	}
	sampling := f.object("sampling_params")
	if f.adopt(sampling); f.fault != nil {
		return nil, f.fault
	}
	if sampling.members == nil {
		sampling.members = map[string]json.RawMessage{}
	}
	add := map[string]json.RawMessage{"prompt": f.members["token_ids"]}
	for _, name := range []string{"model", "stream", "stream_options", "cache_salt", "kv_transfer_params"} {
		add[name] = f.members[name]
	}
	inner := withMembers(sampling, add)
	p, apiErr := readCompletion(inner, s)
	f.params = inner.params
	if p != nil {
		p.form = formTokens
	}
	return p, apiErr
}

// tokensJSON is the answer of /inference/v1/generate.
type tokensJSON struct {
	ID              string             `json:"request_id"`
	Model           string             `json:"model"`
	Created         int64              `json:"created"`
	Usage           *usageJSON         `json:"usage"`
	PromptLogprobs  any                `json:"prompt_logprobs"`
	PromptIDLogprob any                `json:"prompt_token_id_logprobs"`
	PromptIDs       any                `json:"prompt_token_ids"`
	Placeholders    any                `json:"mm_placeholders"`
	Metrics         any                `json:"metrics"`
	KVTransfer      any                `json:"kv_transfer_params"`
	ECTransfer      any                `json:"ec_transfer_params"`
	OutputMode      string             `json:"output_mode"`
	Choices         []tokensChoiceJSON `json:"choices"`
}

// tokensEventJSON is an event of its stream.
type tokensEventJSON struct {
	ID         string             `json:"request_id"`
	Usage      *usageJSON         `json:"usage"`
	OutputMode string             `json:"output_mode"`
	Choices    []tokensChoiceJSON `json:"choices"`
}

type tokensChoiceJSON struct {
	Index    int           `json:"index"`
	Finish   *string       `json:"finish_reason"`
	Stop     any           `json:"stop_reason"`
	IDs      []uint32      `json:"token_ids"`
	Experts  any           `json:"routed_experts"`
	Mask     any           `json:"sampling_mask"`
	Versions []versionJSON `json:"weight_versions"`
	Logprobs any           `json:"logprobs"`
}

// versionJSON says which weights have made the tokens from Start to End.
type versionJSON struct {
	Version string `json:"version"`
	Start   int    `json:"start"`
	End     int    `json:"end"`
}

const outputTokens = "tokens"

// tokensChoice is the choice of an answer or an event: the tokens [from, to), and the end if there is one.
func tokensChoice(c *choice, from, to int, why em.FinishReason) tokensChoiceJSON {
	out := tokensChoiceJSON{
		Index: c.index, IDs: c.ids(from, to), Logprobs: c.logprobs(c.call.plan, from, to, false),
	}
	if why != em.FinishNone {
		name := why.String()
		out.Finish, out.Versions = &name, []versionJSON{{"default", 0, to}}
		if why == em.FinishStop {
			out.Stop = c.stopReason
		}
	}
	return out
}

// tokensAnswer is the answer of a call that does not stream.
func tokensAnswer(c *call, s *settings) *tokensJSON {
	p := c.plan
	usage, cached := c.usage()
	usage.PromptDetails, usage.CompletionDetails = jsonNull, jsonNull
	if s.PromptTokensDetails {
		usage.PromptDetails = promptDetails{cached, jsonNull, jsonNull}
	}
	out := &tokensJSON{
		ID: p.id, Model: p.model, Created: p.created, Usage: usage, OutputMode: outputTokens,
		KVTransfer: c.legs.answer(), Choices: []tokensChoiceJSON{},
	}
	for i := range c.choices {
		ch := &c.choices[i]
		tokens, why := ch.progress()
		ch.settle()
		out.Choices = append(out.Choices, tokensChoice(ch, 0, tokens, why))
	}
	return out
}

func appendEvent(b []byte, v any) []byte {
	return append(append(append(b, "data: "...), mustMarshal(v)...), "\n\n"...)
}

func appendTokens(c *choice, b []byte, tokens int, why em.FinishReason) []byte {
	from := c.sentTokens
	c.sentTokens = tokens
	return appendEvent(b, &tokensEventJSON{
		ID: c.call.plan.id, OutputMode: outputTokens,
		Choices: []tokensChoiceJSON{tokensChoice(c, from, tokens, why)},
	})
}

func appendTokensUsage(c *call, b []byte, s *settings) []byte {
	usage, cached := c.usage()
	if s.PromptTokensDetails {
		usage.PromptDetails = promptDetails{Cached: cached}
	}
	return appendEvent(b, &tokensEventJSON{
		ID: c.plan.id, Usage: usage, OutputMode: outputTokens, Choices: []tokensChoiceJSON{},
	})
}

// readMessages checks the body of /v1/messages, whose streams this engine does not imitate.
func readMessages(f *fields, s *settings) (*plan, *apiError) {
	if !f.has("max_tokens") {
		f.refuse("max_tokens", msgRequired)
	}
	if f.flag("stream") && f.fault == nil {
		f.fault = badRequest("stream", "the simulated engine does not stream /v1/messages")
	}
	chat := asChat(f, "system", "messages", "stop", "stop_sequences")
	if f.fault != nil {
		return nil, f.fault
	}
	p, apiErr := readChat(chat, s)
	if p != nil {
		p.form = formMessages
	}
	return p, apiErr
}

// asChat returns the body of another route as that of a chat, with messages: those of the member name, behind
// a system message that stands in another one. The chat's member to is called from there.
func asChat(f *fields, system, name, to, from string) *fields {
	type message struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	}
	var list []json.RawMessage
	if raw := f.members[name]; len(raw) > 0 && raw[0] == '"' {
		list = append(list, mustMarshal(message{"user", raw}))
	} else {
		f.read(name, &list)
	}
	if f.has(system) {
		list = append([]json.RawMessage{mustMarshal(message{"system", f.members[system]})}, list...)
	}
	out := withMembers(f, map[string]json.RawMessage{"messages": mustMarshal(list), to: f.members[from]})
	for _, other := range []string{"tools", "tool_choice", "n"} { // of another form here, or unknown
		delete(out.members, other)
	}
	return out
}

// messageDocument is the answer of /v1/messages.
type messageDocument struct {
	ID      string        `json:"id"`
	Type    string        `json:"type"`
	Role    string        `json:"role"`
	Content []messagePart `json:"content"`
	Model   string        `json:"model"`
	Stop    string        `json:"stop_reason"`
	Usage   messageUsage  `json:"usage"`
}

type messagePart struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type messageUsage struct {
	Input   int `json:"input_tokens"`
	Output  int `json:"output_tokens"`
	Created int `json:"cache_creation_input_tokens"`
	Read    int `json:"cache_read_input_tokens"`
}

// messageAnswer is the answer of a call of /v1/messages.
func messageAnswer(c *call) *messageDocument {
	ch := &c.choices[0]
	tokens, why := ch.progress()
	ch.settle()
	stop := map[em.FinishReason]string{em.FinishLength: "max_tokens", em.FinishStop: "end_turn"}[why]
	if why == em.FinishStop && ch.stopReason != nil {
		stop = "stop_sequence"
	}
	usage, cached := c.usage()
	return &messageDocument{
		ID: c.plan.id, Type: "message", Role: "assistant", Model: c.plan.model, Stop: stop,
		Content: []messagePart{{"text", string(ch.text(tokens))}},
		Usage:   messageUsage{Input: usage.Prompt, Output: usage.Completion, Read: cached},
	}
}

// renderJSON is what a generation route would hand to the engine.
type renderJSON struct {
	ID          string          `json:"request_id"`
	IDs         []uint32        `json:"token_ids"`
	Offsets     any             `json:"token_offsets"`
	Features    any             `json:"features"`
	Parts       any             `json:"content_parts"`
	Sampling    json.RawMessage `json:"sampling_params"`
	Model       string          `json:"model"`
	Reasoning   any             `json:"reasoning_ended"`
	ReasonerArg any             `json:"reasoning_parser_kwargs"`
	ReturnIDs   any             `json:"return_token_ids"`
	OutputMode  string          `json:"output_mode"`
	Stream      bool            `json:"stream"`
	Options     any             `json:"stream_options"`
	Salt        any             `json:"cache_salt"`
	Priority    int             `json:"priority"`
	KVTransfer  any             `json:"kv_transfer_params"`
	ECTransfer  any             `json:"ec_transfer_params"`
}

// render answers the two render routes: tokens and sampling parameters of a request that is not computed.
func render(s api, w http.ResponseWriter, r *http.Request) {
	body, apiErr := s.body(r)
	if apiErr != nil {
		s.fail(w, apiErr)
		return
	}
	read, prefix := reader(r.URL.Path)
	p, apiErr := read(body, s.set)
	if apiErr != nil {
		s.fail(w, apiErr)
		return
	}
	s.setRequestFields(p, r, prefix)
	out := make([]renderJSON, len(p.prompts))
	for i := range p.prompts {
		q := &p.prompts[i]
		out[i] = renderJSON{
			ID: p.id, IDs: q.ids, Model: p.model, OutputMode: outputTokens, Stream: p.stream,
			Sampling: samplingJSON(p, body, p.room(q, s.set.Model.MaxModelLen)),
		}
		if p.salt != "" {
			out[i].Salt = p.salt
		}
	}
	if p.chat {
		s.writeJSON(w, http.StatusOK, mustMarshal(out[0]))
		return
	}
	s.writeJSON(w, http.StatusOK, mustMarshal(out))
}

// samplingJSON is the sampling parameters of a request; greedy ones leave out what they do not use.
func samplingJSON(p *plan, f *fields, room int) json.RawMessage {
	b := []byte("{")
	member := func(name, value string) {
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(append(strconv.AppendQuote(b, name), ':'), value...)
	}
	float := func(name string, unset float64) float64 {
		v, ok := f.float(name)
		if !ok {
			v = unset
		}
		member(name, pythonFloat(v))
		return v
	}
	float("presence_penalty", 0)
	float("frequency_penalty", 0)
	float("repetition_penalty", 1)
	if float("temperature", 1) > 0 {
		float("top_p", 1)
		float("min_p", 0)
	}
	member("stop", string(mustMarshal(append([]string{}, p.stops...))))
	ids := []int{}
	for id := range p.stopIDs {
		ids = append(ids, id)
	}
	member("stop_token_ids", string(mustMarshal(ids)))
	if p.ignoreEOS {
		member("ignore_eos", "true")
	}
	member("max_tokens", strconv.Itoa(room))
	member("output_kind", "2")
	member("skip_clone", "true")
	member("bad_words", "[]")
	member("skip_reading_prefix_cache", "false")
	return append(b, '}')
}

// pythonFloat spells a number as the imitated engine does: whole ones have a decimal place.
func pythonFloat(v float64) string {
	text := strconv.FormatFloat(v, 'g', -1, 64)
	if !strings.ContainsAny(text, ".eIN") {
		text += ".0"
	}
	return text
}
