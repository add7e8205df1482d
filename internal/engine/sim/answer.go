package sim

import (
	"bytes"
	"cmp"
	"strconv"
	"unicode/utf8"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

const doneEvent = "data: [DONE]\n\n"

// wholeJSON is an answer that does not stream. A member of type any is left out where it is nil, and sent as
// null where it is jsonNull. The members stand in the order of the imitated engine, here and in events.
type wholeJSON struct {
	ID             string       `json:"id"`
	Object         string       `json:"object"`
	Created        int64        `json:"created"`
	Model          string       `json:"model"`
	Choices        []choiceJSON `json:"choices"`
	ServiceTier    *int         `json:"service_tier"`
	Fingerprint    string       `json:"system_fingerprint"`
	Usage          *usageJSON   `json:"usage"`
	PromptLogprobs any          `json:"prompt_logprobs,omitempty"`
	PromptIDs      any          `json:"prompt_token_ids,omitempty"`
	PromptText     any          `json:"prompt_text,omitempty"`
	KVTransfer     any          `json:"kv_transfer_params"`
	ECTransfer     *int         `json:"ec_transfer_params"`
	Metrics        *int         `json:"metrics"`
}

// eventJSON is one event of a stream.
type eventJSON struct {
	ID          string      `json:"id"`
	Object      string      `json:"object"`
	Created     int64       `json:"created"`
	Model       string      `json:"model"`
	Choices     []chunkJSON `json:"choices"`
	Usage       *usageJSON  `json:"usage,omitempty"`
	Fingerprint string      `json:"system_fingerprint,omitempty"`
	PromptIDs   any         `json:"prompt_token_ids,omitempty"`
	PromptText  any         `json:"prompt_text,omitempty"`
}

// choiceStart is what the choices of answers and of events have in common.
type choiceStart struct {
	Index        int          `json:"index"`
	Text         *string      `json:"text,omitempty"`
	Message      *messageJSON `json:"message,omitempty"`
	Delta        *deltaJSON   `json:"delta,omitempty"`
	Logprobs     any          `json:"logprobs"`
	FinishReason *string      `json:"finish_reason"`
	StopReason   any          `json:"stop_reason,omitempty"`
}

type choiceJSON struct {
	choiceStart
	TokenIDs       any `json:"token_ids,omitempty"`
	PromptLogprobs any `json:"prompt_logprobs,omitempty"`
	PromptIDs      any `json:"prompt_token_ids,omitempty"`
	RoutedExperts  any `json:"routed_experts,omitempty"`
}

type chunkJSON struct {
	choiceStart
	PromptIDs any `json:"prompt_token_ids,omitempty"`
	TokenIDs  any `json:"token_ids,omitempty"`
}

type messageJSON struct {
	Role         string         `json:"role"`
	Content      any            `json:"content"`
	Refusal      *int           `json:"refusal"` // this and the others without a value: always null
	Annotations  *int           `json:"annotations"`
	Audio        *int           `json:"audio"`
	FunctionCall *int           `json:"function_call"`
	Calls        []toolCallJSON `json:"tool_calls,omitempty"`
	Reasoning    *int           `json:"reasoning"`
}

type deltaJSON struct {
	Role    string         `json:"role,omitempty"`
	Content any            `json:"content,omitempty"`
	Calls   []toolCallJSON `json:"tool_calls,omitempty"`
}

type usageJSON struct {
	Prompt            int `json:"prompt_tokens"`
	Total             int `json:"total_tokens"`
	Completion        int `json:"completion_tokens"`
	PromptDetails     any `json:"prompt_tokens_details,omitempty"`
	CompletionDetails any `json:"completion_tokens_details,omitempty"`
}

type promptDetails struct {
	Cached     int `json:"cached_tokens"`
	Created    any `json:"created_cache_tokens,omitempty"`
	Multimodal any `json:"multimodal_tokens,omitempty"`
}

// jsonNull is the value of members that the engine sends without a value.
var jsonNull any = (*int)(nil)

// nullUnless is v, or null where it is not wanted.
func nullUnless(wanted bool, v any) any {
	if !wanted {
		return jsonNull
	}
	return v
}

// event begins an event.
func (p *plan) event(choices ...chunkJSON) *eventJSON {
	object := "text_completion"
	if p.chat {
		object = "chat.completion.chunk"
	}
	return &eventJSON{
		ID: p.id, Object: object, Created: p.created, Model: p.model,
		Choices: append([]chunkJSON{}, choices...),
	}
}

// appendChunk writes one event: the text up to tokens, and the end if there is one.
func (c *choice) appendChunk(b []byte, s *settings, tokens int, why em.FinishReason) []byte {
	p, from, at, last := c.call.plan, c.sentTokens, c.sentBytes, why != em.FinishNone
	text, calls := c.delta(tokens, last), c.script.callsTools()
	if p.form != nil {
		return p.form.appendNew(b, c, em.ValidText(text), why)
	}
	if !calls && !last && from > 0 && p.logprobs < 0 && !p.returnIDs && !p.contUsage {
		return c.appendPlain(b, text)
	}
	whole := string(text)
	echo := p.echo && from == 0
	if echo {
		whole = em.Text(c.from.ids) + whole
	}
	d := p.event(c.textChunk(whole))
	out := &d.Choices[0]
	if calls {
		out.Delta = c.script.delta(at, c.sentBytes, from == 0, c.owner())
		if out.Delta == nil && !last && p.logprobs < 0 && !p.returnIDs {
			return b // nothing that a client could use yet
		}
		out.Delta = cmp.Or(out.Delta, &deltaJSON{})
	}
	out.Logprobs = c.logprobs(p, from, tokens, echo)
	c.sentChars += utf8.RuneCount(text)
	c.setEnd(&out.choiceStart, why)
	out.TokenIDs = c.idsIfWanted(from, tokens)
	if !p.chat {
		out.PromptIDs = nullUnless(from == 0 && tokens > 0 && (p.returnIDs || p.echo), c.from.ids)
	}
	if p.contUsage {
		d.Usage = p.usageSoFar(len(c.from.ids), tokens)
	}
	if last && !p.includeUsage {
		d.Fingerprint = s.fingerprint
	}
	return appendEvent(b, d)
}

func appendEvent(b []byte, v any) []byte {
	return append(append(append(b, "data: "...), mustMarshal(v)...), "\n\n"...)
}

// textChunk is the choice of an event that carries text and nothing else.
func (c *choice) textChunk(text string) chunkJSON {
	out := chunkJSON{choiceStart: choiceStart{Index: c.index}, TokenIDs: jsonNull}
	if c.call.plan.chat {
		out.Delta = &deltaJSON{Content: text}
		return out
	}
	out.Text, out.StopReason, out.PromptIDs = &text, jsonNull, jsonNull
	return out
}

// appendPlain writes an event that carries text and nothing else. Nearly all events of a load are of this
// kind: the bytes around the text are encoded once per choice, because encoding each event takes twenty times
// as long.
func (c *choice) appendPlain(b, text []byte) []byte {
	if c.frame[0] == nil {
		const mark = `"@"`
		event := appendEvent(nil, c.call.plan.event(c.textChunk("@")))
		at := bytes.LastIndex(event, []byte(mark)) // behind the text come only nulls
		c.frame = [2][]byte{event[:at+1], event[at+len(mark)-1:]}
	}
	return append(appendEscaped(append(b, c.frame[0]...), text), c.frame[1]...)
}

// appendEscaped appends text as it stands inside a JSON string.
func appendEscaped(b, text []byte) []byte {
	for _, c := range text {
		if c < ' ' || c == '"' || c == '\\' {
			quoted := mustMarshal(string(text))
			return append(b, quoted[1:len(quoted)-1]...)
		}
	}
	if !utf8.Valid(text) {
		return append(b, em.ValidText(text)...)
	}
	return append(b, text...)
}

// idsIfWanted are the tokens [from, to) for a client that asked for them.
func (c *choice) idsIfWanted(from, to int) any {
	if !c.call.plan.returnIDs {
		return jsonNull
	}
	return c.ids(from, to)
}

// setEnd sets finish_reason and stop_reason. Events of a chat have a stop_reason only at the end.
func (c *choice) setEnd(out *choiceStart, why em.FinishReason) {
	if why != em.FinishNone {
		name := why.String()
		if c.script.callsTools() && !c.script.named && why == em.FinishStop && c.stopReason == nil {
			name = "tool_calls" // stays stop where tool_choice named the tool, as in OpenAI's API
		}
		out.FinishReason = &name
	}
	if out.Delta == nil || why != em.FinishNone {
		out.StopReason = nullUnless(why == em.FinishStop && c.stopReason != nil, c.stopReason)
	}
}

// appendRole writes the first event of a chat choice.
func (c *choice) appendRole(b []byte) []byte {
	p := c.call.plan
	d := p.event(chunkJSON{choiceStart: choiceStart{
		Index: c.index, Delta: &deltaJSON{Role: "assistant", Content: ""},
	}})
	if p.contUsage {
		d.Usage = p.usageSoFar(len(c.from.ids), 0)
	}
	d.PromptIDs, d.PromptText = nullUnless(p.returnIDs, c.from.ids), jsonNull
	return appendEvent(b, d)
}

// usageSoFar is the usage of an event in the middle of a stream.
func (p *plan) usageSoFar(prompt, completion int) *usageJSON {
	u := &usageJSON{Prompt: prompt, Total: prompt + completion, Completion: completion}
	if p.chat {
		u.CompletionDetails = jsonNull
	}
	return u
}

// appendUsageEvent writes the event behind the last choice.
func (c *call) appendUsageEvent(b []byte, s *settings) []byte {
	d := c.plan.event()
	usage, cached := c.usage()
	d.Usage, d.Fingerprint = usage, s.fingerprint
	if s.PromptTokensDetails {
		details := promptDetails{Cached: cached}
		if c.plan.chat {
			details.Created = 0
		}
		usage.PromptDetails = details
	}
	return appendEvent(b, d)
}

// usage counts the tokens of a call.
func (c *call) usage() (u *usageJSON, cached int) {
	u = &usageJSON{}
	for i := range c.choices {
		ch := &c.choices[i]
		tokens, _ := ch.progress()
		u.Completion += tokens
		if i%c.plan.n == 0 {
			u.Prompt += len(ch.from.ids)
			cached += c.legs.cached(int(ch.cached.Load()))
		}
	}
	u.Total = u.Prompt + u.Completion
	return u, cached
}

// answer is the body of a finished call that does not stream.
func (c *call) answer(s *settings) []byte {
	p := c.plan
	if p.form != nil {
		return p.form.whole(c)
	}
	d := &wholeJSON{
		ID: p.id, Object: "text_completion", Created: p.created, Model: p.model, Choices: []choiceJSON{},
		Fingerprint: s.fingerprint, KVTransfer: c.legs.answer(),
	}
	for i := range c.choices {
		d.Choices = append(d.Choices, c.choices[i].whole(p))
	}
	usage, cached := c.usage()
	usage.PromptDetails, usage.CompletionDetails = jsonNull, jsonNull
	if s.PromptTokensDetails {
		usage.PromptDetails = promptDetails{cached, nullUnless(p.chat, 0), jsonNull}
	}
	d.Usage = usage
	if p.chat {
		d.Object = "chat.completion"
		d.PromptLogprobs = p.prompts[0].logprobs(p.promptLogprobs)
		d.PromptIDs, d.PromptText = nullUnless(p.returnIDs, p.prompts[0].ids), jsonNull
	}
	return mustMarshal(d)
}

// whole is the choice of an answer that does not stream.
func (c *choice) whole(p *plan) choiceJSON {
	tokens, why := c.progress()
	c.settle()
	text := string(c.text(tokens))
	out := choiceJSON{
		choiceStart: choiceStart{Index: c.index, Logprobs: c.logprobs(p, 0, tokens, p.echo)},
		TokenIDs:    c.idsIfWanted(0, tokens), RoutedExperts: jsonNull,
	}
	c.setEnd(&out.choiceStart, why)
	if p.chat {
		out.Message = &messageJSON{Role: "assistant", Content: text}
		if c.script.callsTools() {
			out.Message = c.script.message(text, c.owner())
		}
		return out
	}
	if p.echo {
		text = em.Text(c.from.ids) + text
	}
	out.Text, out.PromptLogprobs = &text, c.from.logprobs(p.promptLogprobs)
	out.PromptIDs = nullUnless(p.returnIDs, c.from.ids)
	return out
}

// logprob is the log probability of every token: there is no model that could have another one.
const logprob = -0.25

type tokenLogprob struct {
	Token   string          `json:"token"`
	Logprob float64         `json:"logprob"`
	Bytes   []int           `json:"bytes"`
	Top     *[]tokenLogprob `json:"top_logprobs,omitempty"` // nil in the entries of the list itself
}

type completionLogprobs struct {
	Offsets  []int                `json:"text_offset"`
	Logprobs []any                `json:"token_logprobs"`
	Tokens   []string             `json:"tokens"`
	Top      []map[string]float64 `json:"top_logprobs"`
}

// logprobs are those of the answer's tokens [from, to), behind those of an echoed prompt; nil = not wanted.
func (c *choice) logprobs(p *plan, from, to int, echo bool) any {
	if p.logprobs < 0 {
		return nil
	}
	ids := c.ids(from, to)
	if p.chat {
		content := []tokenLogprob{}
		for _, id := range ids {
			one := tokenLogprob{Token: tokenText(id), Logprob: logprob, Bytes: []int{}}
			for _, b := range em.AppendText(nil, id) {
				one.Bytes = append(one.Bytes, int(b))
			}
			top := []tokenLogprob{one}[:min(1, p.logprobs)]
			one.Top = &top
			content = append(content, one)
		}
		return map[string]any{"content": content}
	}
	if echo {
		ids = append(append([]uint32{}, c.from.ids...), ids...)
	}
	out, offset := completionLogprobs{[]int{}, []any{}, []string{}, []map[string]float64{}}, c.sentChars
	for i, id := range ids {
		text := tokenText(id)
		out.Offsets, out.Tokens = append(out.Offsets, offset), append(out.Tokens, text)
		offset += utf8.RuneCountInString(text)
		if echo && i == 0 { // nothing stands in front of the first token of a prompt
			out.Logprobs, out.Top = append(out.Logprobs, nil), append(out.Top, nil)
			continue
		}
		out.Logprobs = append(out.Logprobs, logprob)
		out.Top = append(out.Top, map[string]float64{text: logprob})
	}
	return out
}

// logprobs is prompt_logprobs: null for the first token, then per token a map by its id.
func (q *prompt) logprobs(top int) any {
	if top < 0 {
		return jsonNull
	}
	type entry struct {
		Logprob float64 `json:"logprob"`
		Rank    int     `json:"rank"`
		Decoded string  `json:"decoded_token"`
	}
	out := []map[string]entry{}
	for i, id := range q.ids {
		if i == 0 {
			out = append(out, nil)
			continue
		}
		out = append(out, map[string]entry{strconv.Itoa(int(id)): {logprob, 1, tokenText(id)}})
	}
	return out
}

func tokenText(id uint32) string { return em.ValidText(em.AppendText(nil, id)) }
