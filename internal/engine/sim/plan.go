package sim

import (
	"cmp"
	"math"
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
	form    form // nil = that of completions or chats
	id      string
	model   string
	created int64 // unix seconds

	prompts  []prompt
	n        int // choices per prompt
	maxNew   int // tokens, if isCapped
	isCapped bool

	streaming
	shown
	endings
	demand
	scripts []*script // of the first choices; the others repeat them. none = prose

	seed uint64
	salt string
	rank int // -1 = not pinned

	params *legParams // of the transfer of blocks; never nil
}

// streaming says how an answer is cut into events.
type streaming struct {
	stream       bool
	includeUsage bool
	contUsage    bool
	interval     int // tokens per chunk, after the first one
}

// shown says what an answer shows beside its text.
type shown struct {
	echo           bool
	logprobs       int // -1 = none; chat: number of top_logprobs
	promptLogprobs int // -1 = none
	returnIDs      bool
}

// endings says where an answer ends before max_tokens.
type endings struct {
	stops       []string
	stopIDs     map[int]bool
	includeStop bool
	ignoreEOS   bool
	minTokens   int
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
	p.n = f.numOr("n", 1)
	p.stops = f.texts("stop")
	for _, id := range f.nums("stop_token_ids") {
		if p.stopIDs == nil {
			p.stopIDs = make(map[int]bool)
		}
		p.stopIDs[int(id)] = true
	}
	p.includeStop = f.flag("include_stop_str_in_output")
	p.ignoreEOS = f.flag("ignore_eos")
	p.minTokens, _ = f.num("min_tokens")
	p.returnIDs = f.flag("return_token_ids")
	p.salt = f.str("cache_salt")
	p.interval, _ = f.num("stream_interval")
	p.interval = min(max(1, p.interval), maxInterval)
	seed, _ := f.num("seed")
	p.seed = uint64(seed)
	p.promptLogprobs = f.numOr("prompt_logprobs", -1)
	p.params = f.transferParams()
	options := f.object("stream_options")
	p.includeUsage = options.flag("include_usage")
	p.contUsage = options.flag("continuous_usage_stats") && p.includeUsage
	f.adopt(options)
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
		return badRequest("temperature", "temperature must be non-negative, got %[1]s. "+
			"(parameter=temperature, value=%[1]s)", pythonFloat(t))
	}
	if t, ok := f.float("top_p"); ok && (t <= 0 || t > 1) {
		return badRequest("top_p", "top_p must be in (0, 1], got %v", t)
	}
	if p.minTokens < 0 {
		return badRequest("min_tokens", "min_tokens must be 0 or more, got %d", p.minTokens)
	}
	return nil
}

// lengths checks prompts and max_tokens against the model length and settles how many tokens each prompt may
// get.
func (p *plan) lengths(maxLen int) *apiError {
	if p.isCapped && p.maxNew > maxLen {
		return badRequest("max_tokens", "max_tokens=%[1]d cannot be greater than max_model_len=%[2]d. "+
			"Please request fewer output tokens. (parameter=max_tokens, value=%[1]d)", p.maxNew, maxLen)
	}
	for i := range p.prompts {
		q := &p.prompts[i]
		if len(q.ids) > maxLen {
			return q.tooLong(maxLen)
		}
		if n := p.room(q, maxLen); n < 1 {
			return badRequest("max_tokens", "max_tokens must be at least 1, got %[1]d. "+
				"(parameter=max_tokens, value=%[1]d)", n)
		}
	}
	return nil
}

// tooLong is the answer to a prompt that does not fit. The engine cuts a text behind its first token too
// many.
func (q *prompt) tooLong(maxLen int) *apiError {
	count, contains := len(q.ids), "contains"
	if !q.fromIDs {
		count, contains = maxLen+1, "contains at least"
	}
	return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your "+
		"prompt %s %[3]d input tokens, which exceeds this limit even without any output tokens. "+
		"Please reduce the length of the input prompt. (parameter=input_tokens, value=%[3]d)", maxLen,
		contains, count)
}

func tooManyLogprobs(param, kind string, n int) *apiError {
	return badRequest(param, "Requested %s logprobs of %[2]d, which is greater than max allowed: %d "+
		"(parameter=%s, value=%[2]d)", kind, n, maxTopLogprobs, param)
}

// room is how many tokens q may get.
func (p *plan) room(q *prompt, maxLen int) int {
	left := maxLen - len(q.ids)
	if p.isCapped {
		return min(p.maxNew, left)
	}
	if p.chat {
		return left
	}
	return min(defaultMaxTokens, left)
}

// late makes the checks that the imitated server makes only after it has begun to answer: for streams the
// result is an error event under status 200.
func (p *plan) late(first, ranks int) *apiError {
	if p.rank != noRank && (p.rank < first || p.rank >= first+ranks) {
		return badRequest("", "data_parallel_rank %d is out of range [%d, %d).", p.rank, first, first+ranks)
	}
	if p.logprobs > maxTopLogprobs {
		return tooManyLogprobs("logprobs", "sample", p.logprobs)
	}
	if p.promptLogprobs > maxTopLogprobs {
		return tooManyLogprobs("prompt_logprobs", "prompt", p.promptLogprobs)
	}
	return nil
}

// noRank marks a request that names no rank.
const noRank = math.MinInt

// readCompletion checks the body of /v1/completions.
func readCompletion(f *fields, s *settings) (*plan, *apiError) {
	p := &plan{}
	p.common(f)
	p.echo = f.flag("echo")
	p.logprobs = f.numOr("logprobs", -1)
	p.maxTokens(f, "max_tokens")
	p.prompts = f.prompts()
	if err := p.check(f, s); err != nil {
		return nil, err
	}
	if len(p.prompts) == 0 {
		if raw := f.members["prompt"]; f.has("prompt") && raw[0] == '[' {
			return nil, badRequest("", "You must pass at least one prompt")
		}
		return nil, badRequest("prompt", msgNoPrompt)
	}
	return p, p.finishCheck(f, s)
}

// readChat checks the body of /v1/chat/completions.
func readChat(f *fields, s *settings) (*plan, *apiError) {
	p := &plan{chat: true, shown: shown{logprobs: -1}}
	p.common(f)
	if f.flag("logprobs") {
		p.logprobs, _ = f.num("top_logprobs")
	}
	p.maxTokens(f, "max_completion_tokens", "max_tokens")
	messages := f.messages()
	if err := p.check(f, s); err != nil {
		return nil, err
	}
	if err := p.readTools(f, s, messages); err != nil {
		return nil, err
	}
	if len(messages) == 0 {
		return nil, badRequest("", "Cannot apply chat template to an empty conversation. "+
			"Provide at least one message.")
	}
	if ids := p.params.promptIDs(f); ids != nil {
		p.prompts = []prompt{{ids: ids}}
	} else {
		p.prompts = []prompt{{ids: f.chatTokens(messages)}}
	}
	return p, p.finishCheck(f, s)
}

// check makes the checks behind the reading of the members.
func (p *plan) check(f *fields, s *settings) *apiError {
	if err := p.readRule(f); err != nil {
		return err
	}
	if f.fault != nil {
		return f.fault
	}
	if f.has("stream_options") && !p.stream {
		return badRequest("stream_options", "Stream options can only be defined when `stream=True`. "+
			"(parameter=stream_options)")
	}
	p.model = cmp.Or(p.model, s.Names[0])
	return s.knowsModel(p.model)
}

func (p *plan) finishCheck(f *fields, s *settings) *apiError {
	if err := p.lengths(s.Model.MaxModelLen); err != nil {
		return err
	}
	if err := p.sampling(f); err != nil {
		return err
	}
	if f.fault != nil {
		return f.fault
	}
	var err *apiError
	p.scripts, err = p.demand.scripts(p, s)
	return err
}

// maxTokens reads the first of names that is there.
func (p *plan) maxTokens(f *fields, names ...string) {
	for _, name := range names {
		if p.maxNew, p.isCapped = f.num(name); p.isCapped {
			return
		}
	}
}
