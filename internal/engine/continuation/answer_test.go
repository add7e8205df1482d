package continuation

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// eventOf makes an event.
func eventOf(data string) string { return "data: " + data + "\n\n" }

func chatChunk(id, delta, finish string) string {
	return eventOf(`{"id":"` + id + `","object":"chat.completion.chunk","created":1` + id + `,"model":"m` +
		id + `","choices":[{"index":0,"delta":` + delta + `,"logprobs":null,"finish_reason":` + finish +
		`}]}`)
}

func textPart(id, text string) string {
	raw := openai.AppendString([]byte(`{"content":`), text)
	return chatChunk(id, string(raw)+"}", "null")
}

const doneLine = "data: [DONE]\n\n"

// readAll reads the events of a first stream.
func readAll(a *Answer, events ...string) {
	a.Reset()
	for _, e := range events {
		a.Read([]byte(e))
	}
}

// continueAll is what the client gets of the events of a second stream.
func continueAll(a *Answer, events ...string) (string, error) {
	var out []byte
	for _, e := range events {
		var err error
		if out, err = a.AppendEvent(out, []byte(e)); err != nil {
			return "", err
		}
	}
	return string(out), nil
}

// TestAnswerRead: text and tokens of a stream, and what keeps it with its engine.
func TestAnswerRead(t *testing.T) {
	var a Answer
	role := chatChunk("1", `{"role":"assistant","content":""}`, "null")
	readAll(&a, ": ping\n\n", role, textPart("1", "Hi "), textPart("1", "th\"ere"), textPart("1", "\n"),
		textPart("1", `\`), textPart("1", ""), chatChunk("1", `{"content":"."}`, `"stop"`), doneLine)
	assert.True(t, a.MayGoOn())
	assert.Equal(t, "Hi th\"ere\n\\.", string(a.Text))
	assert.Equal(t, 6, a.Tokens, "with one that has no text yet")
	for what, delta := range map[string]string{
		"reasoning": `{"reasoning_content":"a"}`, "a tool call": `{"tool_calls":[{"index":0}]}`,
		"parts": `{"content":[{"type":"text"}]}`,
	} {
		readAll(&a, textPart("1", "a"), chatChunk("1", delta, "null"), textPart("1", "a"))
		assert.False(t, a.MayGoOn(), what)
	}
	for _, e := range []string{
		`{"choices":[{"text":"a","logprobs":{"tokens":[]}}]}`, `{"choices":[{"text":"a"},{"text":"b"}]}`,
		`{"choices":[{"text":"a","token_ids":[1]}]}`, `{"error":{"message":"a"}}`, `{`, `7`,
	} {
		readAll(&a, textPart("1", "a"), eventOf(e))
		assert.False(t, a.MayGoOn(), e)
	}
	readAll(&a, role)
	assert.False(t, a.MayGoOn(), "no text")
	readAll(&a, eventOf(`{"choices":[{"text":"a"}]}`), eventOf(`{"choices":[{"text":" b"}]}`))
	assert.Equal(t, "a b", string(a.Text))
}

// TestAnswerContinues: the events of a second engine become those of the first one's stream.
func TestAnswerContinues(t *testing.T) {
	usage := func(p, c, cached int) string {
		return eventOf(fmt.Sprintf(`{"id":"2","choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,`+
			`"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`, p, p+c, c, cached))
	}
	long := "A text that is longer than the sixteen bytes. "
	for name, c := range map[string]struct {
		first, stops, events []string
		sent                 string
		tokens               int
		want                 []string // nil: the engine does not go on
	}{
		"text": {
			[]string{"Hi", " there"},
			nil,
			[]string{
				chatChunk("2", `{"role":"assistant","content":""}`, "null"), textPart("2", " you"),
				chatChunk("2", `{}`, `"stop"`), usage(12, 2, 9), doneLine,
			},
			"Hi there", 2,
			[]string{
				textPart("1", " you"), chatChunk("1", `{}`, `"stop"`),
				`data: {"id":"1","choices":[],"usage":{"prompt_tokens":10,"total_tokens":14,` +
					`"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":9}}}` + "\n\n", doneLine,
			},
		},
		"the role beside the text": {
			[]string{"Hi"},
			nil,
			[]string{
				chatChunk("2", `{"role":"assistant","content":"a"}`, "null"),
				chatChunk("2", `{"content":"b", "role":"assistant"}`, "null"),
			},
			"Hi", 1,
			[]string{
				chatChunk("1", `{"content":"a"}`, "null"), chatChunk("1", `{"content":"b"}`, "null"),
			},
		},
		"white space comes again": {
			[]string{"Hi", " ", "\n"},
			nil,
			[]string{textPart("2", " \n\n"), textPart("2", "a")},
			"Hi", 1,
			[]string{textPart("1", "\n"), textPart("1", "a")},
		},
		"other white space": {
			[]string{"Hi", "\n\n"},
			nil,
			[]string{textPart("2", "\n"), textPart("2", "a")},
			"Hi", 1,
			[]string{textPart("1", "a")},
		},
		"no white space": {
			[]string{"Hi\n"}, nil, []string{textPart("2", "a")}, "Hi", 0, []string{textPart("1", "a")},
		},
		"a stop string may have begun": {
			[]string{"Hi", " E"},
			[]string{"END", "x"},
			[]string{textPart("2", " E"), textPart("2", "at")},
			"Hi", 1,
			[]string{textPart("1", "at")},
		},
		"it is one": {
			[]string{"Hi ", "E"},
			[]string{"END"},
			[]string{chatChunk("2", `{"content":""}`, `"stop"`)},
			"Hi", 0,
			[]string{chatChunk("1", `{"content":""}`, `"stop"`)},
		},
		"it is none": {
			[]string{"Hi ", "E"},
			[]string{"END"},
			[]string{textPart("2", " Eat")},
			"Hi", 0,
			[]string{textPart("1", "at")},
		},
		"other text in its place": {
			[]string{"Hi ", "E"}, []string{"END"}, []string{textPart("2", " Run")}, "Hi", 0, nil,
		},
		"the answer from its beginning": {
			[]string{long, "And so"},
			nil,
			[]string{textPart("2", long[:10]), textPart("2", long[10:])},
			long + "And so", 2, nil,
		},
		"it only looks so": {
			[]string{long, "And so"},
			nil,
			[]string{textPart("2", long[:10]), textPart("2", "b")},
			long + "And so", 2,
			[]string{textPart("1", long[:10]+"b")},
		},
		"it looks so to its end": {
			[]string{long, "And so"},
			nil,
			[]string{
				textPart("2", long[:10]), chatChunk("2", `{}`, `"stop"`),
			},
			long + "And so", 2,
			[]string{
				chatChunk("1", `{"content":"`+long[:10]+`"}`, `"stop"`),
			},
		},
		"a text that repeats itself": {
			[]string{long, long},
			nil,
			[]string{textPart("2", long)},
			long + strings.TrimSpace(long), 1,
			[]string{textPart("1", long)},
		},
		"another role": {
			[]string{"Hi"},
			nil,
			[]string{chatChunk("2", `{"role":"user","content":"a"}`, "null")},
			"Hi", 1, nil,
		},
		"a tool call": {
			[]string{"Hi"},
			nil,
			[]string{chatChunk("2", `{"tool_calls":[{"index":0}]}`, "null")},
			"Hi", 1, nil,
		},
		"no JSON": {[]string{"Hi"}, nil, []string{eventOf(`{"id":`)}, "Hi", 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var a Answer
			var parts []string
			for _, text := range c.first {
				parts = append(parts, textPart("1", text))
			}
			readAll(&a, parts...)
			var stops [][]byte
			for _, s := range c.stops {
				stops = append(stops, []byte(s))
			}
			sent, tokens := a.Continue(stops, true)
			assert.Equal(t, c.sent, string(sent))
			assert.Equal(t, c.tokens, tokens)
			got, err := continueAll(&a, c.events...)
			if c.want == nil {
				require.ErrorIs(t, err, ErrAnotherAnswer)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, strings.Join(c.want, ""), got)
		})
	}
}

// BenchmarkAnswerRead: a token of a stream whose text is kept.
func BenchmarkAnswerRead(b *testing.B) {
	var a Answer
	event := []byte(textPart("1", " token"))
	a.Reset()
	b.ReportAllocs()
	for b.Loop() {
		if a.Read(event); len(a.Text) > 1<<16 {
			a.Text = a.Text[:0]
		}
	}
}
