package openai

// whyPinned names the reason why a member of a request body keeps its answer with the engine that began it;
// "" if the member does not. An answer that another engine goes on with begins there as a prompt: whatever
// looks at the output, or shapes it from its beginning, would begin anew.
func whyPinned(key, raw []byte) string {
	switch string(key) {
	case "tools", "functions":
		return unless(!holds(raw), "tools")
	case "response_format":
		return unless(!holds(raw) || isPlainText(raw), "response_format")
	case "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
		"structured_outputs", "structural_tag", "regex", "json_schema", "ebnf", "grammar":
		return unless(!holds(raw), "grammar")
	case "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids":
		return unless(!holds(raw), "logprobs")
	case "echo":
		return unless(!holds(raw), "echo")
	case "suffix":
		return unless(!holds(raw), "suffix")
	case "use_beam_search":
		return unless(!holds(raw), "beam_search")
	case "best_of":
		return unless(isNumber(raw, 1), "several choices")
	case "presence_penalty", "frequency_penalty":
		return unless(isNumber(raw, 0), "penalties")
	case "repetition_penalty":
		return unless(isNumber(raw, 1), "penalties")
	case "bad_words", "no_repeat_ngram_size", "logits_processors", "vllm_xargs", "custom_logit_processor":
		return unless(!holds(raw) || isNumber(raw, 0), "bad_words")
	case "continue_final_message":
		return unless(!holds(raw), "continues already")
	case "add_generation_prompt":
		return unless(raw[0] != 'f', "continues already")
	case "prompt_embeds":
		return unless(!holds(raw), "embeddings")
	}
	return ""
}

func unless(is bool, why string) string {
	if is {
		return ""
	}
	return why
}

// holds reports whether a checked value is not null, false, "", [] or {}.
func holds(raw []byte) bool {
	c := cursor{b: raw}
	return c.skip()
}

// isNumber reports whether a checked value is null or the number n.
func isNumber(raw []byte, n float64) bool {
	if raw[0] == 'n' {
		return true
	}
	got, ok := Number(raw)
	return ok && got == n
}

// isPlainText reports whether a response_format asks for text of any form.
func isPlainText(raw []byte) bool {
	isText := false
	c := cursor{b: raw}
	c.object(func(c *cursor, key []byte) {
		if string(key) == "type" && c.peek() == '"' {
			isText = string(c.str()) == "text"
			return
		}
		c.skip()
	})
	return isText && !c.bad
}

// WhyPinned names the reason why only the engine that began to stream the answer can finish it; "" if another
// one may go on.
func (b *Body) WhyPinned() string {
	switch {
	case b.route != Chat && b.route != Completions:
		return "route"
	case b.IsHead:
		return "size"
	case b.pinned != "":
		return b.pinned
	case b.Choices != 1:
		return "several choices"
	case b.MediaParts > 0:
		return "images"
	case b.route == Completions && b.PromptTokens >= 0:
		return "token ids"
	}
	return ""
}
