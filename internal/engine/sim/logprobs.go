package sim

import (
	"strconv"
	"unicode/utf8"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// Log probabilities are made up: the k-th best token of any position has one fixed value, the chosen one is
// the best.
func logprobOf(k int) float64 { return -0.25 - 1.5*float64(k) }

// alternative is the k-th best token (k ≥ 1) beside id.
func alternative(id uint32, k int) uint32 {
	return uint32('a'+(int(id%7)+k)%26) | uint32('a'+k%26)<<8
}

func tokenText(id uint32) string { return em.ValidText(em.AppendText(nil, id)) }

func appendFloat(dst []byte, x float64) []byte { return strconv.AppendFloat(dst, x, 'f', -1, 64) }

// appendCompletionLogprobs writes the logprobs object of /v1/completions for ids, offset characters into the
// text.
func appendCompletionLogprobs(dst []byte, ids []uint32, top, offset int, firstIsPrompt bool) []byte {
	dst = append(dst, `{"text_offset":[`...)
	for i, id := range ids {
		dst = comma(dst, i)
		dst = strconv.AppendInt(dst, int64(offset), 10)
		offset += utf8.RuneCountInString(tokenText(id))
	}
	dst = append(dst, `],"token_logprobs":[`...)
	for i := range ids {
		dst = comma(dst, i)
		if firstIsPrompt && i == 0 {
			dst = append(dst, "null"...)
			continue
		}
		dst = appendFloat(dst, logprobOf(0))
	}
	dst = append(dst, `],"tokens":[`...)
	for i, id := range ids {
		dst = appendJSON(comma(dst, i), tokenText(id))
	}
	dst = append(dst, `],"top_logprobs":[`...)
	for i, id := range ids {
		dst = comma(dst, i)
		if firstIsPrompt && i == 0 {
			dst = append(dst, "null"...)
			continue
		}
		dst = appendTopMap(dst, id, top)
	}
	return append(dst, "]}"...)
}

func comma(dst []byte, i int) []byte {
	if i > 0 {
		return append(dst, ',')
	}
	return dst
}

func appendTopMap(dst []byte, id uint32, top int) []byte {
	dst = appendFloat(append(appendJSON(append(dst, '{'), tokenText(id)), ':'), logprobOf(0))
	for k := 1; k < top; k++ {
		dst = appendJSON(append(dst, ','), tokenText(alternative(id, k)))
		dst = appendFloat(append(dst, ':'), logprobOf(k))
	}
	return append(dst, '}')
}

// appendChatLogprobs writes the logprobs object of /v1/chat/completions for ids.
func appendChatLogprobs(dst []byte, ids []uint32, top int) []byte {
	dst = append(dst, `{"content":[`...)
	for i, id := range ids {
		dst = appendChatToken(comma(dst, i), id, 0)
		dst = append(dst, `,"top_logprobs":[`...)
		for k := range top {
			alt := id
			if k > 0 {
				alt = alternative(id, k)
			}
			dst = append(appendChatToken(comma(dst, k), alt, k), '}')
		}
		dst = append(dst, "]}"...)
	}
	return append(dst, "]}"...)
}

// appendChatToken leaves its object open.
func appendChatToken(dst []byte, id uint32, k int) []byte {
	dst = appendJSON(append(dst, `{"token":`...), tokenText(id))
	dst = appendFloat(append(dst, `,"logprob":`...), logprobOf(k))
	dst = append(dst, `,"bytes":[`...)
	for i, b := range em.AppendText(nil, id) {
		dst = strconv.AppendUint(comma(dst, i), uint64(b), 10)
	}
	return append(dst, ']')
}

// appendPromptLogprobs writes prompt_logprobs: null for the first token, then per token a map by id of the
// token itself and the best ones.
func appendPromptLogprobs(dst []byte, ids []uint32, top int) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		dst = comma(dst, i)
		if i == 0 {
			dst = append(dst, "null"...)
			continue
		}
		dst = appendPromptToken(append(dst, '{'), id, top+1)
		for k := 1; k <= top; k++ {
			dst = appendPromptToken(append(dst, ','), alternative(id, k), k)
		}
		dst = append(dst, '}')
	}
	return append(dst, ']')
}

func appendPromptToken(dst []byte, id uint32, rank int) []byte {
	dst = strconv.AppendUint(append(dst, '"'), uint64(id), 10)
	dst = appendFloat(append(dst, `":{"logprob":`...), logprobOf(rank))
	dst = strconv.AppendInt(append(dst, `,"rank":`...), int64(rank), 10)
	dst = appendJSON(append(dst, `,"decoded_token":`...), tokenText(id))
	return append(dst, '}')
}
