package sim

import (
	"math"
	"strconv"
	"strings"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// Defaults and bounds of the API.
const (
	defaultMaxTokens = 16    // of completions; chat has what the context leaves
	maxN             = 16384 // choices of a request, over all prompts
	maxInterval      = 1 << 20
	maxTokenID       = math.MaxUint32
)

// plan is a checked generation request.
type plan struct {
	chat    bool
	id      string
	model   string
	created int64 // unix seconds

	prompts []prompt
	n       int // choices per prompt
	maxNew  int // 0 = not given

	stream       bool
	includeUsage bool
	contUsage    bool
	interval     int // tokens per chunk, after the first one

	echo           bool
	logprobs       int // -1 = none; chat: number of top_logprobs
	promptLogprobs int // -1 = none
	returnIDs      bool

	stops       []string
	stopIDs     map[int]bool
	includeStop bool
	ignoreEOS   bool
	minTokens   int
	seed        uint64
	salt        string
	rank        int // -1 = not pinned
}

// prompt is one prompt as tokens.
type prompt struct {
	ids     []uint32
	fromIDs bool // the client sent ids, so nothing had to be tokenized
}

// common reads what both generation routes share.
func (p *plan) common(f *fields) {
	p.model = f.str("model")
	p.stream = f.flag("stream")
	p.n = 1
	if n, ok := f.num("n"); ok {
		p.n = n
	}
	p.stops = f.texts("stop")
	p.readStopIDs(f)
	p.includeStop = f.flag("include_stop_str_in_output")
	p.ignoreEOS = f.flag("ignore_eos")
	p.minTokens, _ = f.num("min_tokens")
	p.returnIDs = f.flag("return_token_ids")
	p.salt = f.str("cache_salt")
	p.interval, _ = f.num("stream_interval")
	p.interval = min(max(1, p.interval), maxInterval)
	seed, _ := f.num("seed")
	p.seed = uint64(seed) //nolint:gosec // any bit pattern is a seed
	p.promptLogprobs = -1
	if k, ok := f.num("prompt_logprobs"); ok {
		p.promptLogprobs = k
	}
	options := f.body.get("stream_options")
	p.includeUsage = f.flagOf(options, "include_usage", "stream_options.include_usage")
	p.contUsage = f.flagOf(options, "continuous_usage_stats", "stream_options.continuous_usage_stats") &&
		p.includeUsage
}

// streamOptions refuses stream_options without stream.
func (p *plan) streamOptions(f *fields) *apiError {
	if options := f.body.get("stream_options"); options.present() && !p.stream {
		return badRequest("stream_options",
			"Stream options can only be defined when `stream=True`. (parameter=stream_options)")
	}
	return nil
}

// sampling checks the sampling parameters that may not be what they like.
func (p *plan) sampling(f *fields) *apiError {
	if p.n < 1 {
		return badRequest("", "n must be at least 1, got %d.", p.n)
	}
	if p.n > maxN || p.n*len(p.prompts) > maxN {
		return badRequest("", "n must be at most %d, got %d for %d prompts.", maxN, p.n, len(p.prompts))
	}
	if t, ok := f.float("temperature"); ok && t < 0 {
		return badRequest("temperature",
			"temperature must be non-negative, got %s. (parameter=temperature, value=%s)", pyFloat(t),
			pyFloat(t))
	}
	if t, ok := f.float("top_p"); ok && (t <= 0 || t > 1) {
		return badRequest("top_p", "top_p must be in (0, 1], got %s. (parameter=top_p, value=%s)", pyFloat(t),
			pyFloat(t))
	}
	if p.minTokens < 0 {
		return badRequest("min_tokens",
			"min_tokens must be greater than or equal to 0, got %d. (parameter=min_tokens, value=%d)",
			p.minTokens, p.minTokens)
	}
	return nil
}

// lengths checks prompts and max_tokens against the model length and settles how many tokens each prompt may
// get.
func (p *plan) lengths(maxLen int, given bool) *apiError {
	if given && p.maxNew > maxLen {
		return badRequest("max_tokens",
			"max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer output tokens. "+
				"(parameter=max_tokens, value=%d)",
			p.maxNew, maxLen, p.maxNew)
	}
	for i := range p.prompts {
		if err := p.prompts[i].tooLong(maxLen); err != nil {
			return err
		}
		if n := p.room(&p.prompts[i], maxLen, given); n < 1 {
			return badRequest("max_tokens",
				"max_tokens must be at least 1, got %d. (parameter=max_tokens, value=%d)", n, n)
		}
	}
	return nil
}

// room is how many tokens q may get.
func (p *plan) room(q *prompt, maxLen int, given bool) int {
	left := maxLen - len(q.ids)
	if given {
		return min(p.maxNew, left)
	}
	if p.chat {
		return left
	}
	return min(defaultMaxTokens, left)
}

func (q *prompt) tooLong(maxLen int) *apiError {
	n, how := len(q.ids), ""
	if n <= maxLen {
		return nil
	}
	if !q.fromIDs { // the server counts a text's tokens only up to one beyond the limit
		n, how = maxLen+1, "at least "
	}
	return badRequest("input_tokens",
		"This model's maximum context length is %d tokens. However, your prompt contains %s%d input tokens, "+
			"which exceeds this limit even without any output tokens. Please reduce the length of the input "+
			"prompt. (parameter=input_tokens, value=%d)",
		maxLen, how, n, n)
}

// late makes the checks that the imitated server makes only after it has begun to answer: for streams the
// result is an error event under status 200.
func (p *plan) late(ranks int) *apiError {
	if p.rank != noRank && (p.rank < 0 || p.rank >= ranks) {
		return badRequest("", "data_parallel_rank %d is out of range [0, %d).", p.rank, ranks)
	}
	if p.logprobs > maxTopLogprobs {
		return badRequest("logprobs",
			"Requested sample logprobs of %d, which is greater than max allowed: %d (parameter=logprobs, "+
				"value=%d)",
			p.logprobs, maxTopLogprobs, p.logprobs)
	}
	if p.promptLogprobs > maxTopLogprobs {
		return badRequest("prompt_logprobs",
			"Requested prompt logprobs of %d, which is greater than max allowed: %d "+
				"(parameter=prompt_logprobs, value=%d)",
			p.promptLogprobs, maxTopLogprobs, p.promptLogprobs)
	}
	return nil
}

// noRank marks a request that names no rank.
const noRank = math.MinInt

// readCompletion checks the body of /v1/completions.
func readCompletion(body value, s *settings) (*plan, *fields, *apiError) {
	p, f := &plan{logprobs: -1}, &fields{body: body}
	p.common(f)
	p.echo = f.flag("echo")
	if k, ok := f.num("logprobs"); ok {
		p.logprobs = k
	}
	given := p.maxTokens(f, "max_tokens")
	p.readPrompts(f)
	if err := f.err(); err != nil {
		return nil, nil, err
	}
	if v := body.get("prompt"); !v.present() || v.kind == kindString && v.text == "" {
		return nil, nil, badRequest("prompt", msgNoPrompt)
	}
	if err := p.streamOptions(f); err != nil {
		return nil, nil, err
	}
	if err := s.knows(p); err != nil {
		return nil, nil, err
	}
	if len(p.prompts) == 0 {
		return nil, nil, badRequest("", "You must pass at least one prompt")
	}
	return p, f, p.finishCheck(f, s, given)
}

func (p *plan) finishCheck(f *fields, s *settings, given bool) *apiError {
	if err := p.lengths(s.maxModelLen, given); err != nil {
		return err
	}
	if err := p.sampling(f); err != nil {
		return err
	}
	return f.err()
}

func (p *plan) readStopIDs(f *fields) {
	for _, id := range f.nums("stop_token_ids") {
		if p.stopIDs == nil {
			p.stopIDs = make(map[int]bool)
		}
		p.stopIDs[id] = true
	}
}

func (p *plan) maxTokens(f *fields, names ...string) (given bool) {
	for _, name := range names {
		if n, ok := f.num(name); ok {
			p.maxNew = n
			return true
		}
	}
	return false
}

// readPrompts takes the four forms of a prompt: string, [string], [int], [[int]].
func (p *plan) readPrompts(f *fields) {
	v := f.body.get("prompt")
	switch {
	case !v.present():
	case v.kind == kindString:
		if v.text != "" {
			p.prompts = []prompt{{ids: em.AppendTokens(nil, v.text)}}
		}
	case v.kind != kindArray:
		f.wrongPrompt(&v)
	case v.ints != nil:
		if ids, ok := tokenIDs(v.ints); ok {
			p.prompts = []prompt{{ids: ids, fromIDs: true}}
			return
		}
		f.badID(&v)
	default:
		p.promptList(f, &v)
	}
}

func (p *plan) promptList(f *fields, v *value) {
	for i := range v.items {
		item := &v.items[i]
		switch {
		case item.kind == kindString && item.text != "":
			p.prompts = append(p.prompts, prompt{ids: em.AppendTokens(nil, item.text)})
		case item.kind == kindArray && item.ints != nil:
			ids, ok := tokenIDs(item.ints)
			if !ok {
				f.badID(item)
				return
			}
			p.prompts = append(p.prompts, prompt{ids: ids, fromIDs: true})
		default:
			f.complain("string_type", "prompt."+strconv.Itoa(i), "Input should be a valid string", item)
		}
	}
}

func (f *fields) wrongPrompt(v *value) {
	f.complain("list_type", "prompt", "Input should be a valid list", v)
	f.complain("list_type", "prompt", "Input should be a valid list", v)
	f.complain("string_type", "prompt", "Input should be a valid string", v)
	f.complain("list_type", "prompt", "Input should be a valid list", v)
}

// badID explains an id list with an id that is none: as a union of four types does, each in turn.
func (f *fields) badID(list *value) {
	for i, n := range list.ints {
		if n >= 0 && n <= maxTokenID {
			continue
		}
		item, loc := list.at(i), "prompt."+strconv.Itoa(i)
		if n > maxTokenID {
			f.faults = append(f.faults, fieldError{kind: outOfVocabulary, input: item.text})
			return
		}
		f.faults = append(f.faults, fieldError{
			kind: "greater_than_equal", loc: "body." + loc,
			msg: "Input should be greater than or equal to 0", input: item.text, ctx: "'ge': 0",
		})
		f.complain("list_type", loc, "Input should be a valid list", &item)
		f.complain("string_type", "prompt", "Input should be a valid string", list)
		f.complain("string_type", loc, "Input should be a valid string", &item)
		return
	}
}

// outOfVocabulary is a complaint that has its own answer.
const outOfVocabulary = "out_of_vocabulary"

func tokenIDs(ints []int64) ([]uint32, bool) {
	ids := make([]uint32, len(ints))
	for i, n := range ints {
		if n < 0 || n > maxTokenID {
			return nil, false
		}
		ids[i] = uint32(n)
	}
	return ids, true
}

// readChat checks the body of /v1/chat/completions.
func readChat(body value, s *settings) (*plan, *fields, *apiError) {
	p, f := &plan{chat: true, logprobs: -1}, &fields{body: body}
	p.common(f)
	if f.flag("logprobs") {
		p.logprobs, _ = f.num("top_logprobs")
	}
	given := p.maxTokens(f, "max_completion_tokens", "max_tokens")
	messages := f.messages()
	if err := f.err(); err != nil {
		return nil, nil, err
	}
	if err := p.streamOptions(f); err != nil {
		return nil, nil, err
	}
	if err := s.knows(p); err != nil {
		return nil, nil, err
	}
	if err := toolChoice(body); err != nil {
		return nil, nil, err
	}
	if len(messages) == 0 {
		return nil, nil, badRequest("",
			"Cannot apply chat template to an empty conversation. Provide at least one message.")
	}
	p.prompts = []prompt{{ids: em.AppendChat(nil, messages, true)}}
	return p, f, p.finishCheck(f, s, given)
}

func toolChoice(body value) *apiError {
	tools, choice := body.get("tools"), body.get("tool_choice")
	if tools.len() > 0 && (!choice.present() || choice.text == "auto") {
		return badRequest("",
			`"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set`)
	}
	return nil
}

// messages reads the conversation; texts of several parts are joined.
func (f *fields) messages() []em.Message {
	v := f.body.get("messages")
	switch {
	case v.kind == kindAbsent:
		f.missing("messages")
		return nil
	case v.kind != kindArray:
		f.complain("list_type", "messages", "Input should be a valid list", &v)
		return nil
	}
	var out []em.Message
	for i := range v.len() {
		item := v.at(i)
		out = append(out, f.message(&item, "messages."+strconv.Itoa(i)))
	}
	return out
}

func (f *fields) message(v *value, loc string) em.Message {
	if v.kind != kindObject {
		f.complain("dict_type", loc, "Input should be a valid dictionary", v)
		return em.Message{}
	}
	role := v.get("role")
	if role.kind != kindString {
		f.faults = append(f.faults, fieldError{
			kind: "missing", loc: "body." + loc + ".role",
			msg: "Field required", input: describe(v),
		})
		return em.Message{}
	}
	return em.Message{Role: role.text, Content: f.content(v.get("content"), loc+".content")}
}

func (f *fields) content(v value, loc string) string {
	switch v.kind {
	case kindAbsent, kindNull:
		return ""
	case kindString:
		return v.text
	case kindArray:
		var parts []string
		for i := range v.len() {
			part := v.at(i)
			text := part.get("text")
			if part.kind != kindObject || text.kind != kindString {
				f.complain("string_type", loc+"."+strconv.Itoa(i),
					"Input should be a text part: this model reads no other media", &part)
				continue
			}
			parts = append(parts, text.text)
		}
		return strings.Join(parts, "\n")
	case kindBool, kindNumber, kindObject:
	}
	f.complain("string_type", loc, "Input should be a valid string", &v)
	return ""
}
